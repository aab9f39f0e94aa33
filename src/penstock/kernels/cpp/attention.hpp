// Causal attention over pages: online softmax over 64 keys at a time by absolute position, in partitions of 512 keys
// that are computed apart and joined from low to high.
//
// A work item is one chunk of a sequence's tokens and one key-value head, with all query heads that share it; a row is
// (token, query head).  What one row does depends on its own position only: it takes the blocks up to its own, and in
// the last of them the keys up to its own, in the same steps whatever the tile around it.  Keys behind it are never
// multiplied, so unwritten memory may hold anything.
//
// After "Online normalizer calculation for softmax" (Milakov, Gimelshein 2018) and FlashAttention-2 (Dao 2023).
#pragma once

#include "elementwise.hpp"

namespace {

// Running softmax of some rows over one partition, or over the partitions joined so far.
struct SoftmaxRows {
  float* top;  // [rows]: largest score, in units of log 2
  float* sum;  // [rows][16]: of the exponentials, lane by lane; joined sums use lane 0
  float* out;  // [rows][width]: sum of exponential times value
};

// Where 64 keys of one head lie: four pages, cells [steps][16 keys] and cells [steps][C].
struct Block {
  long first_key;
  long pages;
  const uint32_t* keys[4];
  const uint32_t* values[4];
  size_t value_stride;
};

template <class D>
struct Attend {
  using Value = typename D::Value;
  static constexpr int kCellsAPage = kPageTokens / D::kPerCell;

  const AttentionArgs& args;
  const Chunk& chunk;
  int kv_head;
  long group, head_dim, rows, blocks_c, width;
  long first_position;
  const int32_t* table;
  Value* q;        // [rows][C]
  float* scores;   // [kAttentionRows][64]
  Value* weights;  // [kAttentionRows][64]
  uint32_t* narrow_values;  // [64 / per_cell][16]: used when C < 16
  float* sums_memory;
  SoftmaxRows now, joined;

  static size_t bytes(const AttentionArgs& a) {
    const size_t rows = static_cast<size_t>(a.max_rows), padded = static_cast<size_t>(a.kv.head_dim + 31);
    return rows * (padded * 2 + 17 * 2 + padded) * 4 + kAttentionRows * 64 * 8 + 64 * 64 + 4096;
  }

  Attend(const AttentionArgs& a, const Chunk& c, int g, int worker) : args(a), chunk(c), kv_head(g) {
    group = a.heads / a.kv.kv_heads;
    head_dim = a.kv.head_dim;
    rows = c.tokens * group;
    blocks_c = (head_dim + 15) / 16;
    width = blocks_c * 16;
    first_position = a.batch.positions[c.token];
    table = a.batch.table + c.sequence * a.batch.table_width;
    char* memory = static_cast<char*>(workspace(worker, bytes(a)));
    const auto take = [&memory](size_t size) {
      char* own = memory;
      memory += (size + 63) / 64 * 64;
      return own;
    };
    scores = reinterpret_cast<float*>(take(kAttentionRows * kBlockKeys * 4));
    weights = reinterpret_cast<Value*>(take(kAttentionRows * kBlockKeys * sizeof(Value)));
    narrow_values = reinterpret_cast<uint32_t*>(take(kBlockKeys * 64));
    SoftmaxRows* const both[2] = {&now, &joined};
    for (SoftmaxRows* own : both) {
      own->top = reinterpret_cast<float*>(take(rows * 4));
      own->sum = reinterpret_cast<float*>(take(rows * 64));
      own->out = reinterpret_cast<float*>(take(rows * width * 4));
    }
    q = reinterpret_cast<Value*>(take(rows * head_dim * sizeof(Value)));
    for (long token = 0; token < c.tokens; ++token)
      __builtin_memcpy(q + token * group * head_dim,
                       static_cast<const Value*>(a.q) + ((c.token + token) * a.heads + g * group) * head_dim,
                       static_cast<size_t>(group * head_dim) * sizeof(Value));
  }

  long position(long row) const { return first_position + row / group; }
  long last_position() const { return first_position + chunk.tokens - 1; }

  // Column of the first lane of block c of the head.  The last block of an odd size overlaps the one before it.
  long column(long c) const { return c * 16 + 16 <= head_dim || head_dim < 16 ? c * 16 : head_dim - 16; }

  void begin_partition() {
    for (long row = 0; row < rows; ++row) now.top[row] = -__builtin_inff();
    __builtin_memset(now.sum, 0, static_cast<size_t>(rows) * 64);
    __builtin_memset(now.out, 0, static_cast<size_t>(rows) * width * 4);
  }

  void partition(long index) {
    begin_partition();
    const long end = min_of((index + 1) * kPartitionKeys, last_position() + 1);
    for (long key = index * kPartitionKeys; key < end; key += kBlockKeys) block(key);
  }

  // Where the 64 keys from `first_key` on lie.
  Block locate(long first_key) const {
    Block found{};
    found.first_key = first_key;
    found.pages = min_of(4, (last_position() - first_key) / kPageTokens + 1);
    found.value_stride = head_dim;
    for (long j = 0; j < 4; ++j) {  // beyond the last page any memory serves: its scores are dropped
      const long page = table[first_key / kPageTokens + (j < found.pages ? j : 0)];
      found.keys[j] = args.kv.keys(page, args.layer, kv_head);
      found.values[j] = args.kv.values(page, args.layer, kv_head);
    }
    return found;
  }

  // Values of a head narrower than a register, so that no load reaches behind a page.
  void widen_values(Block& own) const {
    for (long j = 0; j < own.pages; ++j)
      for (long step = 0; step < kCellsAPage; ++step)
        store(narrow_values + (j * kCellsAPage + step) * 16,
              load_part<U16>(own.values[j] + step * head_dim, static_cast<int>(head_dim)));
    for (long j = 0; j < 4; ++j) own.values[j] = narrow_values + j * kCellsAPage * 16;
    own.value_stride = 16;
  }

  void block(long first_key) {
    Block own = locate(first_key);
    // The first tile of a block fetches the next one.
    const Block next = first_key + kBlockKeys <= last_position() ? locate(first_key + kBlockKeys) : own;
    if (head_dim < 16) widen_values(own);
    const long skipped = first_key > first_position ? (first_key - first_position) * group : 0;
    const long active = rows - skipped, tiles = (active + kAttentionRows - 1) / kAttentionRows;
    for (long t = 0; t < tiles; ++t) {
      const long row = skipped + t * active / tiles;
      const int count = static_cast<int>(skipped + (t + 1) * active / tiles - row);
      score(row, count, own, t == 0 ? &next : nullptr);
      for (int m = 0; m < count; ++m) soften(row + m, m, min_of(kBlockKeys, position(row + m) + 1 - first_key));
      gather(row, count, own, t == 0 ? &next : nullptr);
    }
  }

  // scores[m][key] = q . k for all 64 keys of the block.
  void score(long row, int count, const Block& own, const Block* next) {
    TileArgs tile;
    tile.bases = 1;
    tile.base[0] = own.keys[0];
    tile.step_stride = 16;
    tile.steps = head_dim / D::kPerCell;
    tile.x = reinterpret_cast<const char*>(q + row * head_dim);
    tile.x_stride = static_cast<size_t>(head_dim) * sizeof(Value);
    tile.x_step = 4;
    tile.acc_stride = kBlockKeys;
    const int panels = attention_panels(count);
    const TileFn run = pick_attention(count, panels, next != nullptr);
    tile.next_base[0] = next != nullptr ? next->keys[0] : nullptr;
    for (int j = 0; j < 4; j += panels) {
      for (int p = 0; p < panels; ++p) {
        tile.offset[p] = own.keys[j + p] - own.keys[0];
        tile.next_offset[p] = next != nullptr ? next->keys[j + p] - next->keys[0] : 0;
      }
      tile.acc = scores + j * 16;
      run(tile, false);
    }
  }

  // Scores of the first `valid` keys to weights of row `row`; what was summed before is scaled to the new maximum.
  void soften(long row, int m, long valid) {
    const F16 scale = splat(args.scale * 1.44269504f), nothing = splat(-__builtin_inff());
    F16 s[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      s[j] = load(scores + m * kBlockKeys + j * 16) * scale;
      if (valid < kBlockKeys) s[j] = select(less(iota(j * 16), splat_int(static_cast<int32_t>(valid))), s[j], nothing);
    }
    const float before = now.top[row];
    const float here = max_lanes(max16(max16(s[0], s[1]), max16(s[2], s[3])));
    const float top = here > before ? here : before;
    const F16 shift = splat(top);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      s[j] = D::rounded(exp2_nonpositive(s[j] - shift));
      D::store_rounded(weights + m * kBlockKeys + j * 16, s[j], 16);
    }
    F16 sum = load(now.sum + row * 16);
    if (top != before) {
      now.top[row] = top;
      alignas(64) float factor[16];
      store(factor, exp2_nonpositive(splat(before - top)));
      const F16 shrink = splat(factor[0]);
      sum = sum * shrink;
      float* out = now.out + row * width;
      for (long c = 0; c < width; c += 16) store(out + c, load(out + c) * shrink);
    }
    store(now.sum + row * 16, sum + ((s[0] + s[1]) + (s[2] + s[3])));
  }

  // out += weights . v: cells that are whole for every row of the tile together, then each row's own rest.
  void gather(long row, int count, const Block& own, const Block* next) {
    long common = kBlockKeys;
    for (int m = 0; m < count; ++m) common = min_of(common, position(row + m) + 1 - own.first_key);
    common /= D::kPerCell;
    add_values(row, 0, count, 0, common, own, next);
    for (int m = 0; m < count; ++m) {
      const long valid = min_of(kBlockKeys, position(row + m) + 1 - own.first_key);
      if (valid / D::kPerCell > common) add_values(row + m, m, 1, common, valid / D::kPerCell, own, nullptr);
      if (valid % D::kPerCell != 0) add_half_cell(row + m, m, valid - 1, own);
    }
  }

  void add_values(long row, int m, int count, long from, long to, const Block& own, const Block* next) {
    TileArgs tile;
    tile.step_stride = own.value_stride;
    tile.x_stride = kBlockKeys * sizeof(Value);
    tile.x_step = 4;
    tile.acc_stride = static_cast<size_t>(width);
    const int wide = attention_panels(count);
    while (from < to) {
      const long page = from / kCellsAPage, inside = from % kCellsAPage;
      if (inside == 0 && to - from >= kCellsAPage) {
        tile.bases = static_cast<int>((to - from) / kCellsAPage);
        tile.steps = kCellsAPage;
      } else {
        tile.bases = 1;
        tile.steps = min_of(to - from, kCellsAPage - inside);
      }
      for (int b = 0; b < tile.bases; ++b) {
        tile.base[b] = own.values[page + b] + inside * own.value_stride;
        tile.next_base[b] = next != nullptr ? next->values[page + b] : nullptr;
      }
      tile.x = reinterpret_cast<const char*>(weights + m * kBlockKeys) + from * 4;
      for (long c = 0; c < blocks_c;) {
        const int panels = c + wide <= blocks_c ? wide : 1;
        for (int p = 0; p < panels; ++p) tile.offset[p] = tile.next_offset[p] = column(c + p);
        tile.acc = now.out + row * width + c * 16;
        pick_attention(count, panels, next != nullptr)(tile, true);
        c += panels;
      }
      from += tile.bases * tile.steps;
    }
  }

  static TileFn pick_attention(int rows, int panels, bool fetch) {
    return fetch ? pick_attention_tile<D, Fetch::kNext>(rows, panels)
                 : pick_attention_tile<D, Fetch::kNothing>(rows, panels);
  }

  // The last key of a row whose cell's later half belongs to a key behind it: that half counts as zero.
  void add_half_cell(long row, int m, long key, const Block& own) {
    const long cell = key / D::kPerCell;
    const uint32_t* from = own.values[cell / kCellsAPage] + cell % kCellsAPage * own.value_stride;
    const uint32_t weight = load_cell(weights + m * kBlockKeys + key);
    float* out = now.out + row * width;
    for (long c = 0; c < blocks_c; ++c) {
      const U16 cells = load_as<U16>(from + column(c)) & splat_word(0xFFFFu);
      store(out + c * 16, dot_cells<D>(load(out + c * 16), cells, weight & 0xFFFFu));
    }
  }

  // Joins (top, sum, out) of one row's next partition to those before it.
  void join(long row, float top, float sum, const float* out, bool first) {
    float* to = joined.out + row * width;
    if (first) {
      joined.top[row] = top;
      joined.sum[row * 16] = sum;
      __builtin_memcpy(to, out, static_cast<size_t>(width) * 4);
      return;
    }
    const float before = joined.top[row], highest = top > before ? top : before;
    alignas(64) float factor[16] = {before - highest, top - highest};
    store(factor, exp2_nonpositive(load(factor)));
    const F16 a = splat(factor[0]), b = splat(factor[1]);
    joined.top[row] = highest;
    joined.sum[row * 16] = joined.sum[row * 16] * factor[0] + sum * factor[1];
    for (long c = 0; c < width; c += 16) store(to + c, load(to + c) * a + load(out + c) * b);
  }

  void join_partition(long index) {
    for (long row = 0; row < rows; ++row)
      if (position(row) >= index * kPartitionKeys)
        join(row, now.top[row], sum_lanes(load(now.sum + row * 16)), now.out + row * width, index == 0);
  }

  void save_partition(float* to) const {
    for (long row = 0; row < rows; ++row, to += width + 2) {
      to[0] = now.top[row];
      to[1] = sum_lanes(load(now.sum + row * 16));
      __builtin_memcpy(to + 2, now.out + row * width, static_cast<size_t>(width) * 4);
    }
  }

  void join_saved(long index, const float* from) {
    for (long row = 0; row < rows; ++row, from += width + 2)
      if (position(row) >= index * kPartitionKeys) join(row, from[0], from[1], from + 2, index == 0);
  }

  void finish() const {
    for (long row = 0; row < rows; ++row) {
      const F16 inverse = splat(1.0f / joined.sum[row * 16]);
      const long token = chunk.token + row / group, head = kv_head * group + row % group;
      Value* to = static_cast<Value*>(args.out) + (token * args.heads + head) * head_dim;
      for (long c = 0; c < blocks_c; ++c)
        store_values<D>(to + column(c), load(joined.out + row * width + c * 16) * inverse,
                        static_cast<int>(min_of(16, head_dim)));
    }
  }
};

template <class D>
void attention_typed(const AttentionArgs& args) {
  const long heads = args.kv.kv_heads;
  if (args.partial == nullptr) {
    each_item(args.chunk_count * heads, args.work, [&](long item, int worker) {
      // Late chunks see the most keys, so they go first.
      const Chunk& chunk = args.chunks[args.chunk_count - 1 - item / heads];
      Attend<D> attend(args, chunk, static_cast<int>(item % heads), worker);
      for (long index = 0; index < chunk.parts; ++index) {
        attend.partition(index);
        attend.join_partition(index);
      }
      attend.finish();
    });
    return;
  }
  const size_t saved = static_cast<size_t>(args.max_rows) * ((args.kv.head_dim + 15) / 16 * 16 + 2);
  each_item(args.part_count * heads, args.work, [&](long item, int worker) {
    const long part = item / heads;
    const Chunk* chunk = args.chunks;
    while (part >= chunk->part + chunk->parts) ++chunk;
    Attend<D> attend(args, *chunk, static_cast<int>(item % heads), worker);
    attend.partition(part - chunk->part);
    attend.save_partition(args.partial + item * saved);
  });
  each_item(args.chunk_count * heads, args.work / 64, [&](long item, int worker) {
    const Chunk& chunk = args.chunks[item / heads];
    Attend<D> attend(args, chunk, static_cast<int>(item % heads), worker);
    for (long index = 0; index < chunk.parts; ++index)
      attend.join_saved(index, args.partial + ((chunk.part + index) * heads + item % heads) * saved);
    attend.finish();
  });
}

}  // namespace
