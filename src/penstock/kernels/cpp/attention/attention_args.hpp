// What a family's operations around attention are given: KV memory, the step's sequences, and a struct of pointers each.
//
// Shapes use the letters of kernels/ops.py.  Nothing is checked here: the bindings have checked it all.
#pragma once

#include <cstddef>
#include <cstdint>

// Never emitted as a symbol of its own: a copy compiled for AVX-512 could be linked into code for other processors.
#define PS_EVERYWHERE __attribute__((always_inline)) inline

namespace penstock {

constexpr int kPageTokens = 16;
constexpr int kBlockKeys = 64;       // keys that attention reduces at a time
constexpr int kPartitionKeys = 512;  // keys of one partition
constexpr int kKeyClasses = 8;       // partition p is in class p mod 8; classes are leaves of a tree (kernels/sum_tree.py)
constexpr int kMaxHeadDim = 1024;

// KV memory: pages of [layers][K: page_heads x key_dim / per_cell x 16 cells | V: page_heads x 16 / per_cell x value_dim
// cells].  Shared memory has no V: values are the first columns of K.  A rank that has some heads of a model finds them
// where pages of the whole model have them.
struct KvView {
  uint32_t* cells;
  long pages;
  int layers;
  int kv_heads;
  int key_dim;
  int value_dim;
  bool shared;
  int per_cell;
  int page_heads = 0;                 // that a layer of a page has room for; 0: kv_heads
  const int32_t* place_of = nullptr;  // [kv_heads]: each head's place among them; null: its own number

  PS_EVERYWHERE size_t key_cells() const { return static_cast<size_t>(kPageTokens) * key_dim / per_cell; }
  PS_EVERYWHERE size_t value_cells() const {
    return shared ? 0 : static_cast<size_t>(kPageTokens) * value_dim / per_cell;
  }
  PS_EVERYWHERE size_t layer_cells() const { return room() * (key_cells() + value_cells()); }
  PS_EVERYWHERE size_t page_cells() const { return layers * layer_cells(); }
  PS_EVERYWHERE size_t room() const { return static_cast<size_t>(page_heads > 0 ? page_heads : kv_heads); }
  PS_EVERYWHERE int place(int head) const { return place_of == nullptr ? head : place_of[head]; }
  PS_EVERYWHERE uint32_t* layer_of(long page, int layer) const {
    return cells + page * page_cells() + layer * layer_cells();
  }
  PS_EVERYWHERE uint32_t* keys(long page, int layer, int head) const {
    return layer_of(page, layer) + place(head) * key_cells();
  }
  PS_EVERYWHERE uint32_t* values(long page, int layer, int head) const {
    return layer_of(page, layer) + room() * key_cells() + place(head) * value_cells();
  }
};

struct BatchView {
  const int32_t* positions;  // [tokens]
  const int32_t* starts;     // [sequences + 1]
  const int32_t* table;      // [sequences, table_width]
  long tokens;
  long sequences;
  long table_width;
  const int32_t* turns = nullptr;  // [tokens, 3]: how far each axis is turned; null: by the position
};

// Root-mean-square norm of groups of columns, in place.
struct NormHeadsArgs {
  float* x;  // [rows, width]
  long rows;
  long width;
  const float* weight;  // [group]
  long group;
  float eps;
  long first;  // column
  long count;  // groups
};

// cos and sin of the first 2 * pairs columns of a head, by position.
struct RopeView {
  const float* table;  // [positions, 2, pairs]; null with no pairs: nothing is rotated
  long pairs;
  bool interleaved;  // pairs are columns (2 i, 2 i + 1), else (i, i + pairs)
  const uint8_t* axes = nullptr;  // [pairs]: which of a token's three turns each follows; null: all the position
};

struct RopeArgs {
  const float* qkv;  // [tokens, (heads + kv_heads) * key_dim + kv_heads * value_dim]
  RopeView rope;
  const int32_t* angles_of;    // [tokens]: row of the table
  const float* q_scale;        // [positions], or null
  const int32_t* sequence_of;  // [tokens]
  BatchView batch;
  KvView kv;
  int layer;
  int heads;
  void* q;  // [tokens, heads, key_dim]
};

// Sparse attention (kernels/ops.py: Sparse), in blocks of 64 keys: the first `sinks`, the last `window` up to the
// position's own, and of those between them `chosen`.
struct Sparse {
  long sinks = 0;  // 0: every position reads everything
  long window = 0;
  long chosen = 0;
  long start = 0;  // positions before it read everything

  // Are there blocks that a position leaves out?
  PS_EVERYWHERE bool thins(long position) const {
    return sinks > 0 && position >= start && position / kBlockKeys >= sinks + window + chosen;
  }
  PS_EVERYWHERE bool is(const Sparse& other) const {
    return sinks == other.sinks && window == other.window && chosen == other.chosen && start == other.start;
  }
};

// Which keys a position sees: none behind it, and of those before it the last `window`, or those with the same
// floor(position / chunk); 0 means all.  `both`: as far behind it as before it; then there are no chunks.  `until`: all
// positions see the keys below it and no others; 0: there is no such limit.
struct KeyRule {
  long window;
  long chunk;
  bool both = false;
  long until = 0;
  Sparse sparse = {};  // without window, chunk and until only

  PS_EVERYWHERE bool is(const KeyRule& other) const {
    return window == other.window && chunk == other.chunk && both == other.both && until == other.until &&
           sparse.is(other.sparse);
  }
  PS_EVERYWHERE long first_key(long position) const {
    const long left = window > 0 && position >= window ? position - window + 1 : 0;
    const long begun = chunk > 0 ? position / chunk * chunk : 0;
    return left > begun ? left : begun;
  }
  // One behind the last key that a position of a sequence of `length` tokens sees.
  PS_EVERYWHERE long end_key(long position, long length) const {
    if (until > 0) return until;
    if (!both) return position + 1;
    return window > 0 && position + window < length ? position + window : length;
  }
  // The first position, from `first` on, that sees this key.
  PS_EVERYWHERE long first_seer(long key, long first) const {
    const long from = !both ? key : window > 0 ? key - window + 1 : first;
    return from > first ? from : first;
  }
  // The last position, up to `last`, that sees this key.
  PS_EVERYWHERE long last_seer(long key, long last) const {
    if (window > 0 && key + window - 1 < last) last = key + window - 1;
    if (chunk > 0 && (key / chunk + 1) * chunk - 1 < last) last = (key / chunk + 1) * chunk - 1;
    return last;
  }
};

// Latent vectors to their pages: the first value_dim columns normed, the others turned.
struct LatentWriteArgs {
  const float* latent;  // [tokens, key_dim]
  const float* weight;  // [value_dim]
  float eps;
  RopeView rope;
  const int32_t* sequence_of;  // [tokens]
  BatchView batch;
  KvView kv;  // shared
  int layer;
};

// Queries split for latent attention: what the absorbed matrices read, and the turned rest.
struct LatentSplitArgs {
  const float* q;  // [tokens, heads, plain + 2 * rope.pairs]
  RopeView rope;
  BatchView batch;
  long heads;
  long plain;
  void* x;       // [tokens, heads, plain]
  void* turned;  // [tokens, heads, key_dim], of which the last 2 * rope.pairs columns are written
  long key_dim;
};

// Some tokens of one sequence: the unit of attention's work for one key-value head.
struct Chunk {
  long sequence;
  long token;       // first
  long tokens;
  long part;        // index of its first partition among those of all chunks
  long parts;       // partitions from the first key that its first token sees to the last that its last token sees
  long first_part;  // the first of them, by absolute position
};

// How scores become weights.
struct Softmax {
  float scale;
  float softcap;       // scores become softcap * tanh(score / softcap); 0: they stay
  const float* sinks;  // [heads]: a score more for each row, whose weight goes nowhere; or null
};

// What is added to the scaled score of a position and a key: entry key - position + reach of a head's row, the first or
// the last entry where they are further apart.
struct BiasView {
  const float* table;  // [heads, 2 * reach + 1]; null: nothing is added
  long reach;
};

// What sparse attention works out before it reduces keys.
struct SparseStep {
  const long* first_mean;  // [sequences + 1]: of each sequence's pages of mean keys
  const long* mean_pages;  // [sequences]: pages of keys that have a mean there
  uint32_t* means;         // [first_mean[sequences], kv_heads] pages of keys: 16 means each
  uint8_t* taken;          // [tokens, kv_heads, bytes]: bit b % 8 of byte b / 8: does the token read block b?
  long bytes;              // a partition of keys each

  PS_EVERYWHERE uint8_t* taken_by(long token, long head, long heads) const {
    return taken + (token * heads + head) * bytes;
  }
};
static_assert(kPartitionKeys == 8 * kBlockKeys);

// Numbers of the softmax of some rows over some keys: values, sums of 16 lanes, and the largest score of each, rounded up to
// whole lines of the cache.
PS_EVERYWHERE size_t softmax_floats(long rows, long value_dim) {
  return static_cast<size_t>(rows * ((value_dim + 15) / 16 * 16 + 16) + (rows + 15) / 16 * 16);
}

struct AttentionArgs {
  const void* q;  // [tokens, heads, key_dim]
  KvView kv;
  BatchView batch;
  int layer;
  int heads;
  KeyRule rule;
  Softmax softmax;
  BiasView bias;
  const Chunk* chunks;
  long chunk_count;
  long part_count;
  long max_rows;   // of one chunk: tokens times heads a key-value head
  float* partial;  // null, or [part_count * kv_heads, softmax_floats(max_rows, value_dim)]: partitions apart
  double work;     // multiply-adds, roughly
  void* out;       // [tokens, heads * value_dim]
  const SparseStep* sparse;  // null: every token of the step reads all that it sees
};

}  // namespace penstock
