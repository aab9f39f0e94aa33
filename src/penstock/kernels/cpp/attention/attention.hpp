// Attention over pages: online softmax over 64 keys at a time by absolute position, in partitions of 512 keys that begin
// anew.  Partition p is in class p mod 8: those of a class are joined from low to high, then classes by a tree, so that
// devices can have a part of the classes each (kernels/sum_tree.py).  Partitions are computed in that order, too: then at
// most five softmaxes of a chunk's rows wait for one another, however long its keys are.
//
// A work item is one chunk of a sequence's tokens and one key-value head, with all query heads that share it; a row is
// (token, query head).  What one row does depends on its own position only: it takes the blocks that have keys it sees,
// and in the first and last of them those keys only, in the same steps whatever the tile around it.  Other keys are
// never multiplied, so memory that is not written yet, or belongs to others again, may hold anything.
#pragma once

#include "attention/softmax_rows.hpp"
#include "attention/sparse_attention.hpp"

namespace {

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
  using Wide = typename D::Wide;
  using Input = typename Wide::Value;
  static constexpr int kCellsAPage = kPageTokens / D::kPerCell;

  const AttentionArgs& args;
  const Chunk& chunk;
  int kv_head;
  long group, key_dim, value_dim, rows, blocks_c, width;
  long first_position;
  long end;  // one behind the last key that any row sees
  const int32_t* table;
  int32_t *first_key, *end_key;  // [rows]: keys that each row sees
  Input* q;        // [rows][C]
  float* scores;   // [kAttentionRows][64]
  Input* weights;  // [kAttentionRows][64]
  float* biases;   // [64]
  uint32_t* own_values;  // [64 / per_cell][max(16, value_dim)]: of heads narrower than a register, and shared ones
  SoftmaxRows now;  // of the present partition

  // Some partitions' softmax, if there is one: of a node of the tree that waits for its right neighbor.
  struct Joined {
    SoftmaxRows rows;
    bool any;
  };
  static constexpr int kPending = 4;  // subtrees of 4, 2 and 1 classes, and the present class
  Joined pending[kPending];

  static bool keeps_values(const KvView& kv) { return kv.shared || kv.value_dim < 16; }
  static size_t own_bytes(const KvView& kv) {
    return keeps_values(kv) ? kBlockKeys / D::kPerCell * (static_cast<size_t>(kv.value_dim) + 16) * 4 : 0;
  }

  static size_t bytes(const AttentionArgs& a) {
    const auto rows = static_cast<size_t>(a.max_rows), lines = static_cast<size_t>(16);
    const size_t softmax = softmax_floats(a.max_rows, a.kv.value_dim) * 4 * (1 + kPending);
    const size_t queries = rows * static_cast<size_t>(a.kv.key_dim) * sizeof(Input);
    return (kAttentionRows * (4 + sizeof(Input)) + 4) * kBlockKeys + own_bytes(a.kv) + softmax + rows * 8 + queries +
           lines * 64;
  }

  Attend(const AttentionArgs& a, const Chunk& c, int g, int worker) : args(a), chunk(c), kv_head(g) {
    group = a.heads / a.kv.kv_heads;
    key_dim = a.kv.key_dim;
    value_dim = a.kv.value_dim;
    rows = c.tokens * group;
    blocks_c = (value_dim + 15) / 16;
    width = blocks_c * 16;
    first_position = a.batch.positions[c.token];
    const long length = a.batch.positions[a.batch.starts[c.sequence + 1] - 1] + 1;
    end = a.rule.end_key(last_position(), length);
    table = a.batch.table + c.sequence * a.batch.table_width;
    char* memory = static_cast<char*>(workspace(worker, bytes(a)));
    const auto take = [&memory](size_t size) {
      char* own = memory;
      memory += (size + 63) / 64 * 64;
      return own;
    };
    scores = reinterpret_cast<float*>(take(kAttentionRows * kBlockKeys * 4));
    weights = reinterpret_cast<Input*>(take(kAttentionRows * kBlockKeys * sizeof(Input)));
    biases = reinterpret_cast<float*>(take(kBlockKeys * 4));
    own_values = reinterpret_cast<uint32_t*>(take(own_bytes(a.kv)));
    const auto softmax = [&] {
      return SoftmaxRows(reinterpret_cast<float*>(take(softmax_floats(rows, width) * 4)), rows, width);
    };
    now = softmax();
    for (Joined& own : pending) own = {softmax(), false};
    first_key = reinterpret_cast<int32_t*>(take(rows * 4));
    end_key = reinterpret_cast<int32_t*>(take(rows * 4));
    q = reinterpret_cast<Input*>(take(rows * key_dim * sizeof(Input)));
    for (long row = 0; row < rows; ++row) {
      const long position = first_position + row / group;
      first_key[row] = static_cast<int32_t>(a.rule.first_key(position));
      end_key[row] = static_cast<int32_t>(a.rule.end_key(position, length));
    }
    for (long token = 0; token < c.tokens; ++token)
      write_inputs<D>(static_cast<const Value*>(a.q) + ((c.token + token) * a.heads + g * group) * key_dim,
                      group * key_dim, q + token * group * key_dim);
  }

  long last_position() const { return first_position + chunk.tokens - 1; }

  Seen seen(long row, long block_key) const {
    const long from = first_key[row] - block_key;
    return {from > 0 ? from : 0, min_of(kBlockKeys, end_key[row] - block_key)};
  }

  // Column of the first lane of block c of the values.  The last block of an odd size overlaps the one before it.
  long column(long c) const { return c * 16 + 16 <= value_dim || value_dim < 16 ? c * 16 : value_dim - 16; }

  // The softmax `now` of a partition, by absolute position; `next`: the one that is computed after it, or -1.
  void partition(long index, long next) {
    const uint32_t wanted = begin_partition(index);
    const long behind = min_of((index + 1) * kPartitionKeys, end);
    for (long key = begin_of(index); key < behind; key += kBlockKeys) {
      if (!(wanted >> key / kBlockKeys % 8 & 1)) continue;
      block(key, key + kBlockKeys < behind ? key + kBlockKeys : next < 0 ? key : begin_of(next));
    }
    now.close(rows);
  }

  // The first of a partition's blocks of keys that any row sees.
  long begin_of(long index) const {
    const long first = first_key[0] / kBlockKeys * kBlockKeys;
    return first > index * kPartitionKeys ? first : index * kPartitionKeys;
  }

  // Clears the rows that have a part in it; which of its blocks any row takes, a bit each.
  uint32_t begin_partition(long index) const {
    if (args.sparse == nullptr) {
      now.clear(0, rows);
      return 0xFF;
    }
    uint32_t wanted = 0;
    for (long token = 0; token < chunk.tokens; ++token) {
      const uint32_t own = taken(token)[index];
      if (own != 0) {
        now.clear(token * group, group);
      } else {
        now.leave_out(token * group, group);
      }
      wanted |= own;
    }
    return wanted;
  }

  // All partitions of the chunk: `compute` (partition, the next one or -1) leaves one's softmax in `now`.
  template <class Compute>
  void join_partitions(const Compute& compute) {
    int depth = 0;
    for (long c = 0; c < kKeyClasses; ++c, ++depth) {
      pending[depth].any = false;
      for (long index = first_of(c); index < behind_last(); index += kKeyClasses) {
        compute(index, after(index));
        add(pending[depth], now);
      }
      for (long left = c; left & 1; left >>= 1, --depth)
        if (pending[depth].any) add(pending[depth - 1], pending[depth].rows);
    }
  }

  // The first to come is taken as it is; memory changes hands instead.
  void add(Joined& to, SoftmaxRows& next) const {
    if (to.any) return to.rows.join(next, rows);
    const SoftmaxRows free = to.rows;
    to = {next, true};
    next = free;
  }

  long behind_last() const { return chunk.first_part + chunk.parts; }
  // The first partition of a class, here or behind the last one.
  long first_of(long c) const { return chunk.first_part + ((c - chunk.first_part) & (kKeyClasses - 1)); }

  // The partition that is computed after another, or -1.
  long after(long index) const {
    if (index + kKeyClasses < behind_last()) return index + kKeyClasses;
    for (long c = index % kKeyClasses + 1; c < kKeyClasses; ++c)
      if (first_of(c) < behind_last()) return first_of(c);
    return -1;
  }

  // Which blocks a token of the chunk takes, a byte a partition.
  const uint8_t* taken(long token) const { return args.sparse->taken_by(chunk.token + token, kv_head, args.kv.kv_heads); }
  bool takes(long token, long block) const { return taken(token)[block / 8] >> block % 8 & 1; }

  // Where the 64 keys from `key` on lie.
  Block locate(long key) const {
    Block found{};
    found.first_key = key;
    found.pages = min_of(4, (end - 1 - key) / kPageTokens + 1);
    found.value_stride = value_dim;
    for (long j = 0; j < 4; ++j) {  // beyond the last page any memory serves: its scores are dropped
      const long page = table[key / kPageTokens + (j < found.pages ? j : 0)];
      found.keys[j] = args.kv.keys(page, args.layer, kv_head);
      found.values[j] = args.kv.values(page, args.layer, kv_head);
    }
    return found;
  }

  // Values of heads that are no panels as they lie: shared ones lie as keys do, and of those narrower than a register
  // no load may reach behind the page.
  void make_values(Block& own) const {
    own.value_stride = static_cast<size_t>(value_dim < 16 ? 16 : value_dim);
    for (long j = 0; j < own.pages; ++j) {
      uint32_t* to = own_values + static_cast<size_t>(j) * kCellsAPage * own.value_stride;
      if (args.kv.shared)
        turn_keys<D>(own.keys[j], value_dim, to, own.value_stride);
      else
        for (long step = 0; step < kCellsAPage; ++step)
          store(to + step * 16, load_part<U16>(own.values[j] + step * value_dim, static_cast<int>(value_dim)));
    }
    for (long j = 0; j < 4; ++j) own.values[j] = own_values + static_cast<size_t>(j) * kCellsAPage * own.value_stride;
  }

  // `after`: the block that is computed after this one; the first tile of a block fetches it.
  void block(long key, long after) {
    Block own = locate(key);
    if (keeps_values(args.kv)) make_values(own);
    if (args.sparse != nullptr) return runs(key, own);
    const Block next = after != key ? locate(after) : own;
    const long skipped = (args.rule.first_seer(key, first_position) - first_position) * group;
    const long last = args.rule.last_seer(key + kBlockKeys - 1, last_position());
    reduce(skipped, (last - first_position + 1) * group - skipped, own, &next);
  }

  // A block for the tokens that take it, those that follow one another together.
  void runs(long key, const Block& own) {
    for (long token = 0; token < chunk.tokens; ++token) {
      const long first = token;
      while (token < chunk.tokens && takes(token, key / kBlockKeys)) ++token;
      if (token > first) reduce(first * group, (token - first) * group, own, nullptr);
    }
  }

  // A block for `active` rows from `skipped` on.
  void reduce(long skipped, long active, const Block& own, const Block* next) {
    const long tiles = (active + kAttentionRows - 1) / kAttentionRows;
    for (long t = 0; t < tiles; ++t) {
      const long row = skipped + t * active / tiles;
      const int count = static_cast<int>(skipped + (t + 1) * active / tiles - row);
      score(row, count, own, t == 0 ? next : nullptr);
      for (int m = 0; m < count; ++m)
        now.soften<Wide>(row + m, seen(row + m, own.first_key), args.softmax, scores + m * kBlockKeys,
                      bias(row + m, own.first_key), weights + m * kBlockKeys);
      gather(row, count, own, t == 0 && !keeps_values(args.kv) ? next : nullptr);
    }
  }

  // What is added to a row's scaled scores of the 64 keys from `key` on; null: nothing.
  const float* bias(long row, long key) const {
    const BiasView& how = args.bias;
    if (how.table == nullptr) return nullptr;
    const float* middle = how.table + (kv_head * group + row % group) * (2 * how.reach + 1) + how.reach;
    const long apart = key - (first_position + row / group);
    if (apart >= -how.reach && apart + kBlockKeys - 1 <= how.reach) return middle + apart;
    for (long j = 0; j < kBlockKeys; ++j) {
      const long near = min_of(how.reach, apart + j);
      biases[j] = middle[near < -how.reach ? -how.reach : near];
    }
    return biases;
  }

  // scores[m][key] = q . k for all 64 keys of the block.
  void score(long row, int count, const Block& own, const Block* next) {
    TileArgs tile;
    tile.bases = 1;
    tile.base[0] = own.keys[0];
    tile.step_stride = 16;
    tile.steps = key_dim / D::kPerCell;
    tile.x = reinterpret_cast<const char*>(q + row * key_dim);
    tile.x_stride = static_cast<size_t>(key_dim) * sizeof(Input);
    tile.x_step = Wide::kInputBytes;
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

  // out += weights . v, for every row from the first key it sees to the last: cells that are whole for all rows of the
  // tile together, what a row sees before and behind them by itself.
  void gather(long row, int count, const Block& own, const Block* next) {
    constexpr long kCells = kBlockKeys / D::kPerCell;
    // Later rows are at later positions, and begin and end no earlier.
    long from = (seen(row + count - 1, own.first_key).begin + D::kPerCell - 1) / D::kPerCell;
    long to = seen(row, own.first_key).end / D::kPerCell;
    if (from > to) from = to = kCells;  // nothing together
    if (from > 0)
      for (int m = 0; m < count; ++m) gather_before(row + m, m, from, own);
    add_values(row, 0, count, from, to, own, next);
    if (to < kCells)
      for (int m = 0; m < count; ++m) gather_behind(row + m, m, to, own);
  }

  void gather_before(long row, int m, long cell, const Block& own) {
    const Seen keys = seen(row, own.first_key);
    if (keys.begin % D::kPerCell != 0) add_half_cell(row, m, keys.begin, 0xFFFF0000u, own);
    const long whole = (keys.begin + D::kPerCell - 1) / D::kPerCell;
    add_values(row, m, 1, whole, min_of(cell, keys.end / D::kPerCell), own, nullptr);
    if (keys.end / D::kPerCell < cell) gather_last(row, m, keys, own);
  }

  void gather_behind(long row, int m, long cell, const Block& own) {
    const Seen keys = seen(row, own.first_key);
    if (keys.end / D::kPerCell < cell) return;
    add_values(row, m, 1, cell, keys.end / D::kPerCell, own, nullptr);
    gather_last(row, m, keys, own);
  }

  void gather_last(long row, int m, const Seen& keys, const Block& own) {
    if (keys.end % D::kPerCell != 0) add_half_cell(row, m, keys.end - 1, 0x0000FFFFu, own);
  }

  void add_values(long row, int m, int count, long from, long to, const Block& own, const Block* next) {
    TileArgs tile;
    tile.step_stride = own.value_stride;
    tile.x_stride = kBlockKeys * sizeof(Input);
    tile.x_step = Wide::kInputBytes;
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
      tile.x = reinterpret_cast<const char*>(weights + m * kBlockKeys + from * D::kPerCell);
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
    return fetch ? pick_attention_tile<Wide, Fetch::kNext>(rows, panels)
                 : pick_attention_tile<Wide, Fetch::kNothing>(rows, panels);
  }

  // A key whose cell's other half the row does not see: that half counts as zero.
  void add_half_cell(long row, int m, long key, uint32_t half, const Block& own) {
    const long cell = key / D::kPerCell;
    const uint32_t* from = own.values[cell / kCellsAPage] + cell % kCellsAPage * own.value_stride;
    Input seen_only[D::kPerCell] = {};
    seen_only[key % D::kPerCell] = weights[m * kBlockKeys + key];
    float* out = now.out + row * width;
    for (long c = 0; c < blocks_c; ++c) {
      const U16 cells = load_as<U16>(from + column(c)) & splat_word(half);
      store(out + c * 16, dot_inputs<Wide>(load(out + c * 16), cells, seen_only));
    }
  }

  void finish() const {
    const SoftmaxRows& joined = pending[0].rows;
    for (long row = 0; row < rows; ++row) {
      const long token = chunk.token + row / group, head = kv_head * group + row % group;
      const float* sinks = args.softmax.sinks;
      const F16 factor = splat(joined.normalizer(row, sinks == nullptr ? nullptr : sinks + head));
      Value* to = static_cast<Value*>(args.out) + (token * args.heads + head) * value_dim;
      for (long c = 0; c < blocks_c; ++c)
        store_values<D>(to + column(c), load(joined.out + row * width + c * 16) * factor,
                        static_cast<int>(min_of(16, value_dim)));
    }
  }
};

template <class D>
void attention_typed(const AttentionArgs& args) {
  const long heads = args.kv.kv_heads;
  if (args.sparse != nullptr) choose_blocks<D>(args);
  if (args.partial == nullptr) {
    each_item(args.chunk_count * heads, args.work, [&](long item, int worker) {
      // Late chunks see the most keys, so they go first.
      const Chunk& chunk = args.chunks[args.chunk_count - 1 - item / heads];
      Attend<D> attend(args, chunk, static_cast<int>(item % heads), worker);
      attend.join_partitions([&](long index, long next) { attend.partition(index, next); });
      attend.finish();
    });
    return;
  }
  const size_t apart = softmax_floats(args.max_rows, args.kv.value_dim);
  const auto kept = [&](const Attend<D>& attend, long part, long head) {
    return SoftmaxRows(args.partial + static_cast<size_t>(part * heads + head) * apart, attend.rows, attend.width);
  };
  each_item(args.part_count * heads, args.work, [&](long item, int worker) {
    const long part = item / heads;
    const Chunk* chunk = args.chunks;
    while (part >= chunk->part + chunk->parts) ++chunk;
    Attend<D> attend(args, *chunk, static_cast<int>(item % heads), worker);
    attend.now = kept(attend, part, item % heads);
    attend.partition(chunk->first_part + part - chunk->part, -1);
  });
  each_item(args.chunk_count * heads, args.work / 64, [&](long item, int worker) {
    const Chunk& chunk = args.chunks[item / heads];
    Attend<D> attend(args, chunk, static_cast<int>(item % heads), worker);
    attend.join_partitions([&](long index, long) {
      attend.now = kept(attend, chunk.part + index - chunk.first_part, item % heads);
    });
    attend.finish();
  });
}

}  // namespace
