// Tensors from files to memory: read, checked and packed in one pass by threads that end with the load.
//
// Compressed weights that are to be plain in memory take two steps: counts and escapes of all tensors come first, then each
// piece of blocks is decoded as it comes.
//
// The work is cut into pieces of some 256 KiB, small enough that what was read is still in a core's cache when it is
// checked and packed.  The cut is part of the format of checksums (docs/format.md): it depends on the tensor alone.
// Whoever loads is about to fork: when `join` returns, the process has no thread of this.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "compressed/compressed.hpp"
#include "gemm/packing.hpp"
#include "host/xxh3.hpp"

namespace penstock {

constexpr uint64_t kPieceBytes = 256 << 10;

struct LoadFailure {
  long tensor;
  std::string reason;
};

// A compressed matrix on its way into plain cells: it begins with a panel and a block of the weight and ends with others,
// or with the weight; so do the weight's segments.
struct DecodedMatrix {
  PackedView layout;  // of the whole plain weight
  uint32_t* cells;
  long row, column, rows, columns;
  PanelCode code;
  void (*decode)(const CompressedView&, long panel, uint32_t* cells);
  uint32_t* counts;  // [panels]
  uint8_t* escapes;
  uint64_t escape_bytes;  // without the padding behind them

  long panels() const { return (rows + 15) / 16; }
};

class Loading {
 public:
  Loading() = default;
  ~Loading() { stop(); }
  Loading(const Loading&) = delete;
  Loading& operator=(const Loading&) = delete;

  // A tensor has one section or, compressed, three; sections are added in the order of their bytes, before `start`.
  long add_tensor();
  // Rows [first, first + rows) of a weight, packed into its `cells`.
  void add_rows(long tensor, int file, uint64_t offset, const PackedView& layout, uint32_t* cells, Source source,
                long first, long rows);
  // Blocks of `panels` compressed panels; escapes[panel] becomes what their planes count.
  void add_panels(long tensor, int file, uint64_t offset, uint8_t* to, long panels, long blocks_a_panel,
                  uint32_t* escapes);
  void add_bytes(long tensor, int file, uint64_t offset, uint8_t* to, uint64_t bytes);
  // All sections of a compressed matrix, decoded into rows and columns of a plain weight's `cells`.
  void add_decoded(long tensor, int file, uint64_t offset, const DecodedMatrix& matrix);

  void start(int threads);
  bool wait(double seconds);  // is all done, or has something failed?
  void stop();                // what is not done stays undone; no thread is left
  uint64_t done_bytes() const { return done_bytes_.load(std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_; }
  const std::unique_ptr<LoadFailure>& failure() const { return failure_; }  // after `wait` said true

  // Of `text` and then the checksums of the tensor's pieces.
  Checksum checksum(long tensor, const std::string& text) const;

 private:
  enum class Kind : uint8_t { kRows, kPanels, kBytes, kDecoded };
  struct Decoding {
    DecodedMatrix matrix;
    std::vector<PanelCode> codes;
    std::vector<uint64_t> escape_begin;  // [panels + 1], once all counts are here
  };
  struct Section {
    Kind kind;
    int file;
    Source source;
    PackedView layout;
    uint32_t* cells;  // of the whole weight, or escapes of the section's panels
    uint8_t* to;
    long first;             // row of the weight
    uint64_t unit;          // bytes of a row, panel or byte
    long blocks_a_panel;
    long decoding = -1;   // its place among `decodings_`, if there is one
    bool comes_first = false;
  };
  struct Piece {
    uint32_t section;
    uint64_t offset;  // in the file
    uint64_t begin;   // in the section
    uint64_t bytes;
  };

  void add(long tensor, const Section& section, uint64_t offset, uint64_t units, uint64_t units_a_piece);
  void work(int worker);
  bool read(const Piece& piece, uint8_t* to);
  void take(const Piece& piece, const Section& section, uint8_t* buffer, Checksum& checksum);
  void decode(const Piece& piece, const Section& section, const uint8_t* blocks);
  void first_group_done();
  bool first_groups_are_done();
  void fail(const Piece& piece, const std::string& reason);
  void join();

  std::vector<Section> sections_;
  std::vector<long> tensor_of_;  // by section
  std::vector<Piece> pieces_;
  std::vector<size_t> tensor_begin_;  // first piece
  std::vector<size_t> order_;         // of the pieces
  std::vector<size_t> groups_;        // ends of the runs of `order_` that one thread takes at a time
  std::vector<Decoding> decodings_;
  size_t first_groups_ = 0;           // have what others wait for
  std::vector<Checksum> checksums_;
  uint64_t bytes_ = 0, buffer_bytes_ = 0;

  std::vector<std::thread> threads_;
  std::vector<int> thread_ids_;
  std::vector<std::unique_ptr<uint8_t[]>> buffers_;
  std::atomic<size_t> next_group_{0};
  std::atomic<uint64_t> done_bytes_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t first_groups_left_ = 0;
  int working_ = 0;
  std::unique_ptr<LoadFailure> failure_;
};

}  // namespace penstock
