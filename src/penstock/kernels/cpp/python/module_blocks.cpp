// The Python face of hashed blocks: chains of hashes, and the index of who holds which.
#include <nanobind/stl/optional.h>

#include <cstring>

#include "host/blake3.hpp"
#include "host/block_index.hpp"
#include "python/binding.hpp"

namespace penstock {
namespace {

// Items of a tuple or list, without a copy of it.
class Items {
 public:
  explicit Items(const nb::object& of) {
    PyObject* raw = of.ptr();
    require(PyTuple_Check(raw) || PyList_Check(raw), "expected a tuple or a list");
    items_ = PySequence_Fast_ITEMS(raw);
    size_ = PySequence_Fast_GET_SIZE(raw);
  }
  long size() const { return size_; }
  PyObject* operator[](long i) const { return items_[i]; }

 private:
  PyObject** items_;
  long size_;
};

const uint8_t* hash_of(PyObject* item) {
  require(PyBytes_Check(item) && PyBytes_GET_SIZE(item) == kHashBytes, "a hash is 32 bytes");
  return reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(item));
}

uint32_t token_of(PyObject* item) {
  const unsigned long value = PyLong_AsUnsignedLong(item);
  if (PyErr_Occurred()) throw nb::python_error();
  require(value <= UINT32_MAX, "a token id has at most 32 bits");
  return static_cast<uint32_t>(value);
}

// Hashes of the full blocks of tokens[first:last], the first one's parent being `parent`.
nb::list hash_blocks(const nb::bytes& parent, const nb::object& tokens, long first, long last) {
  const Items items(tokens);
  require(first >= 0 && last <= items.size(), "tokens outside the prompt");
  const uint8_t* before = hash_of(parent.ptr());
  nb::list hashes;
  uint32_t block[kBlockTokens];
  uint8_t hash[kHashBytes];
  for (long start = first; start + kBlockTokens <= last; start += kBlockTokens) {
    for (long i = 0; i < kBlockTokens; ++i) block[i] = token_of(items[start + i]);
    chain_hashes(before, block, 1, hash);
    before = hash;
    hashes.append(nb::bytes(reinterpret_cast<const char*>(hash), kHashBytes));
  }
  return hashes;
}

void hash_chain(const nb::bytes& root, const In<uint32_t, 1>& tokens, const Out<uint8_t, 2>& out) {
  const long blocks = dim(out, 0);
  require(dim(out, 1) == kHashBytes && dim(tokens, 0) == blocks * kBlockTokens, "out must be [blocks, 32]");
  chain_hashes(hash_of(root.ptr()), tokens.data(), blocks, out.data());
}

class PyBlockIndex {
 public:
  PyBlockIndex(long max_blocks, int max_owners) : index_(checked(max_blocks), checked_owners(max_owners)) {}

  std::optional<int> open() { return index_.open(); }
  void close(int owner) { index_.close(owner); }
  void sweep(long places) { index_.sweep(places); }
  long add(int owner, const nb::bytes& keys) {
    const std::vector<uint64_t> read = keys_of(keys);
    return index_.add(owner, read.data(), static_cast<long>(read.size()));
  }
  void remove(int owner, const nb::bytes& keys) {
    const std::vector<uint64_t> read = keys_of(keys);
    index_.remove(owner, read.data(), static_cast<long>(read.size()));
  }
  bool has(int owner, const nb::bytes& hash) const { return index_.has(owner, key_of(hash.ptr())); }
  void match(const nb::object& hashes, const Out<int32_t, 1>& depths) const {
    require(dim(depths, 0) == index_.max_owners(), "depths must have a number for each owner");
    const Items items(hashes);
    index_.match([&](long i) { return key_of(items[i]); }, items.size(), depths.data());
  }
  long blocks() const { return index_.blocks(); }
  uint64_t memory_bytes() const { return index_.memory_bytes(); }

 private:
  static long checked(long max_blocks) {
    require(max_blocks > 0, "an index of no blocks remembers nothing");
    return max_blocks;
  }
  static int checked_owners(int max_owners) {
    require(max_owners > 0 && max_owners <= 1 << 16, "an index has 1 to 65536 owners");
    return max_owners;
  }
  static uint64_t key_of(PyObject* hash) {
    uint64_t key;
    std::memcpy(&key, hash_of(hash), sizeof key);
    return key;
  }
  static std::vector<uint64_t> keys_of(const nb::bytes& packed) {
    require(packed.size() % sizeof(uint64_t) == 0, "keys are 8 bytes each");
    std::vector<uint64_t> keys(packed.size() / sizeof(uint64_t));
    if (!keys.empty()) std::memcpy(keys.data(), packed.data(), packed.size());  // no keys: data() may be null
    return keys;
  }

  BlockIndex index_;
};

}  // namespace

void bind_blocks(nb::module_& m) {
  m.def("hash_blocks", &hash_blocks);
  m.def("hash_chain", &hash_chain);
  nb::class_<PyBlockIndex>(m, "BlockIndex")
      .def(nb::init<long, int>())
      .def("open", &PyBlockIndex::open)
      .def("close", &PyBlockIndex::close)
      .def("sweep", &PyBlockIndex::sweep)
      .def("add", &PyBlockIndex::add)
      .def("remove", &PyBlockIndex::remove)
      .def("has", &PyBlockIndex::has)
      .def("match", &PyBlockIndex::match)
      .def("blocks", &PyBlockIndex::blocks)
      .def("memory_bytes", &PyBlockIndex::memory_bytes);
}

}  // namespace penstock
