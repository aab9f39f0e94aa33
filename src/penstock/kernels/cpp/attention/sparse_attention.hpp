// Sparse attention, before any key is reduced: which blocks of 64 keys each token reads.
//
//     blocks   | sinks | ......... candidates ......... | window, up to the token's own |
//     read     |  all  | those that its queries like best |            all              |
//
// A query's liking of a page is its product with the mean of the page's 16 keys; a token's liking of a block is the most
// that any of the heads which share the keys likes any of its four pages.  So the choice follows from the token's own
// queries, its position and the keys before it: never from the cut of a prompt into steps, nor from other tokens.
//
// Mean keys lie as keys do, sixteen to a page, so that the one inner product serves them too.  Knows no softmax.
#pragma once

#include "attention/rope.hpp"
#include "attention/transposed_values.hpp"

namespace {

constexpr long kBlockPages = kBlockKeys / kPageTokens;

// The mean of a page's keys becomes key `lane` of a page of means; `turned` has room for the page.
template <class D>
void mean_key(const uint32_t* keys, long key_dim, uint32_t* turned, uint32_t* means, long lane) {
  using Value = typename D::Value;
  alignas(64) Value mean[kMaxHeadDim];
  turn_keys<D>(keys, key_dim, turned, static_cast<size_t>(key_dim));
  for (long c = 0; c < key_dim; c += 16) {
    const int count = static_cast<int>(min_of(16, key_dim - c));
    F16 sum = splat(0.0f);
    for (long row = 0; row < kPageTokens / D::kPerCell; ++row) {
      const U16 cells = load_part<U16>(turned + row * key_dim + c, count);
      if constexpr (D::kPerCell == 1) {
        sum = sum + bits_as<F16>(cells);
      } else {
        sum = (sum + low_half(cells)) + high_half(cells);
      }
    }
    store_values<D>(mean + c, sum * splat(1.0f / kPageTokens), count);
  }
  write_key<D>(reinterpret_cast<Value*>(means), mean, key_dim, lane);
}

template <class D>
void make_means(const AttentionArgs& args) {
  const SparseStep& sparse = *args.sparse;
  const long heads = args.kv.kv_heads, all = sparse.first_mean[args.batch.sequences] * heads;
  const double work = static_cast<double>(all) * static_cast<double>(kPageTokens * args.kv.key_cells());
  each_item(all, work, [&](long item, int worker) {
    const long group = item / heads;
    long s = 0;
    while (sparse.first_mean[s + 1] <= group) ++s;
    const long first = (group - sparse.first_mean[s]) * kPageTokens;
    const long count = min_of(kPageTokens, sparse.mean_pages[s] - first);
    const int32_t* table = args.batch.table + s * args.batch.table_width + first;
    auto* turned = static_cast<uint32_t*>(workspace(worker, (args.kv.key_cells() + 16) * 4));
    uint32_t* means = sparse.means + static_cast<size_t>(item) * args.kv.key_cells();
    for (long lane = 0; lane < count; ++lane)
      mean_key<D>(args.kv.keys(table[lane], args.layer, static_cast<int>(item % heads)), args.kv.key_dim, turned, means, lane);
  });
}

// The blocks that the tokens of one chunk read of one key-value head.
template <class D>
struct Choose {
  using Value = typename D::Value;
  using Wide = typename D::Wide;
  using Input = typename Wide::Value;

  const AttentionArgs& args;
  const Sparse& rule;
  const Chunk& chunk;
  int kv_head;
  long group, key_dim, rows, first_position;
  long pages;        // whose means are looked at: those of all candidates of the last token
  long width;        // of a row of `liked`
  float* scores;     // [kAttentionRows][64]
  float* liked;      // [tokens][width]
  int32_t* ordered;  // [blocks]: likings as integers of the same order
  Input* q;          // [rows][C]

  Choose(const AttentionArgs& a, const Chunk& c, int g, int worker) : args(a), rule(a.rule.sparse), chunk(c), kv_head(g) {
    group = a.heads / a.kv.kv_heads;
    key_dim = a.kv.key_dim;
    rows = c.tokens * group;
    first_position = a.batch.positions[c.token];
    const long last = first_position + c.tokens - 1;
    pages = rule.thins(last) ? candidates_end(last) * kBlockPages : 0;
    width = (pages + 63) / 64 * 64;
    const size_t sizes[4] = {kAttentionRows * kBlockKeys * 4, static_cast<size_t>(c.tokens * width) * 4,
                             static_cast<size_t>(width / kBlockPages) * 4, static_cast<size_t>(rows * key_dim) * sizeof(Input)};
    size_t all = 0;
    for (const size_t size : sizes) all += (size + 63) / 64 * 64;
    char* memory = static_cast<char*>(workspace(worker, all));
    char* own[4];
    for (int i = 0; i < 4; memory += (sizes[i] + 63) / 64 * 64, ++i) own[i] = memory;
    scores = reinterpret_cast<float*>(own[0]);
    liked = reinterpret_cast<float*>(own[1]);
    ordered = reinterpret_cast<int32_t*>(own[2]);
    q = reinterpret_cast<Input*>(own[3]);
  }

  // One behind the last block before a position's window.
  long candidates_end(long position) const { return position / kBlockKeys - rule.window + 1; }

  void run() {
    if (pages > 0) like_pages();
    for (long token = 0; token < chunk.tokens; ++token) {
      const long position = first_position + token, own = position / kBlockKeys;
      uint8_t* taken = args.sparse->taken_by(chunk.token + token, kv_head, args.kv.kv_heads);
      __builtin_memset(taken, 0, static_cast<size_t>(args.sparse->bytes));
      if (!rule.thins(position)) {
        take(taken, 0, own + 1);
        continue;
      }
      take(taken, 0, rule.sinks);
      take(taken, own - rule.window + 1, own + 1);
      take_best(taken, liked + token * width, rule.sinks, candidates_end(position));
    }
  }

  static void take(uint8_t* taken, long from, long behind) {
    for (long block = from; block < behind; ++block) taken[block / 8] |= static_cast<uint8_t>(1 << block % 8);
  }

  void like_pages() {
    for (long token = 0; token < chunk.tokens; ++token)
      write_inputs<D>(
          static_cast<const Value*>(args.q) + ((chunk.token + token) * args.heads + kv_head * group) * key_dim,
          group * key_dim, q + token * group * key_dim);
    const F16 nothing = splat(-__builtin_inff());
    for (long i = 0; i < chunk.tokens * width; i += 16) store(liked + i, nothing);
    for (long page = 0; page < pages; page += 64)
      for (long row = 0; row < rows; row += kAttentionRows) like(row, static_cast<int>(min_of(kAttentionRows, rows - row)), page);
  }

  // What some rows like of 64 pages goes to their tokens.
  void like(long row, int count, long page) {
    const size_t cells = args.kv.key_cells(), apart = static_cast<size_t>(args.kv.kv_heads) * cells;
    const long panels = min_of(4, (pages - page + 15) / 16);
    TileArgs tile{};
    tile.bases = 1;
    tile.step_stride = 16;
    tile.steps = key_dim / D::kPerCell;
    tile.x = reinterpret_cast<const char*>(q + row * key_dim);
    tile.x_stride = static_cast<size_t>(key_dim) * sizeof(Input);
    tile.x_step = Wide::kInputBytes;
    tile.acc_stride = kBlockKeys;
    const long first = args.sparse->first_mean[chunk.sequence] + page / 16;
    for (long j = 0; j < panels;) {
      const int wide = attention_panels(count), now = j + wide <= panels ? wide : 1;
      tile.base[0] = args.sparse->means + static_cast<size_t>(first + j) * apart + static_cast<size_t>(kv_head) * cells;
      for (int p = 0; p < now; ++p) tile.offset[p] = static_cast<ptrdiff_t>(static_cast<size_t>(p) * apart);
      tile.acc = scores + j * 16;
      pick_attention_tile<Wide, Fetch::kNothing>(count, now)(tile, false);
      j += now;
    }
    for (int m = 0; m < count; ++m)
      for (long j = 0; j < panels; ++j) {
        float* to = liked + (row + m) / group * width + page + j * 16;
        store(to, max16(load(scores + m * kBlockKeys + j * 16), load(to)));
      }
  }

  // Of blocks [from, behind) the `chosen` that are liked best; of equals the first.
  void take_best(uint8_t* taken, const float* likes, long from, long behind) {
    const long count = behind - from;
    for (long i = 0; i < count; ++i) {
      const float* own = likes + (from + i) * kBlockPages;
      const float a = own[0] > own[1] ? own[0] : own[1], b = own[2] > own[3] ? own[2] : own[3], most = a > b ? a : b;
      int32_t bits;
      __builtin_memcpy(&bits, &most, 4);
      ordered[i] = bits ^ ((bits >> 31) & 0x7FFFFFFF);
    }
    const int32_t least = threshold(count);
    long equals = rule.chosen - above(count, least);
    for (long i = 0; i < count; ++i)
      if (ordered[i] > least || (ordered[i] == least && equals-- > 0)) take(taken, from + i, from + i + 1);
  }

  // The largest number that `chosen` of the first `count` reach.
  int32_t threshold(long count) const {
    int32_t least = above(count, -1) >= rule.chosen ? 0 : INT32_MIN;
    for (int bit = 30; bit >= 0; --bit) {
      const int32_t higher = least | (1 << bit);
      if (above(count, higher - 1) >= rule.chosen) least = higher;
    }
    return least;
  }

  // How many of the first `count` are more than this.
  long above(long count, int32_t bound) const {
    int32_t found = 0;
    for (long i = 0; i < count; ++i) found += ordered[i] > bound;
    return found;
  }
};

// Fills `args.sparse`.
template <class D>
void choose_blocks(const AttentionArgs& args) {
  make_means<D>(args);
  const long heads = args.kv.kv_heads;
  each_item(args.chunk_count * heads, args.work / 16, [&](long item, int worker) {
    const Chunk& chunk = args.chunks[args.chunk_count - 1 - item / heads];
    Choose<D>(args, chunk, static_cast<int>(item % heads), worker).run();
  });
}

}  // namespace
