#include "host/weight_loader.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace penstock {
namespace {

constexpr uint64_t kGroupBytes = 4 << 20;   // taken by one thread at a time, so that each reads on where it was
constexpr uint64_t kAheadBytes = 32 << 20;  // asked of a drive in advance
constexpr double kMemorySpeed = 1.5e9;      // bytes a second; a slower reader waits for a drive

// Zero bits in all three planes: escapes.
uint32_t count_escapes(const uint8_t* panel, long blocks) {
  uint32_t count = 0;
  for (long from = 0; from < blocks; from += kChunkBlocks) {
    const long own = std::min(kChunkBlocks, blocks - from);
    for (long b = 0; b < own; ++b) {
      uint64_t plane[3];
      std::memcpy(plane, panel + b * kPlaneBytes, kPlaneBytes);
      count += static_cast<uint32_t>(__builtin_popcountll(~(plane[0] | plane[1] | plane[2])));
    }
    panel += own * kBlockBytes;
  }
  return count;
}

}  // namespace

long Loading::add_tensor() {
  tensor_begin_.push_back(pieces_.size());
  return static_cast<long>(tensor_begin_.size()) - 1;
}

void Loading::add_rows(long tensor, int file, uint64_t offset, const PackedView& layout, uint32_t* cells,
                       Source source, long first, long rows) {
  const uint64_t row = static_cast<uint64_t>(layout.k) * (source == Source::kFp32 ? 4 : 2);
  Section section{Kind::kRows, file, source, layout, cells, nullptr, first, row, 0};
  add(tensor, section, offset, static_cast<uint64_t>(rows), std::max<uint64_t>(16, kPieceBytes / row / 16 * 16));
}

void Loading::add_panels(long tensor, int file, uint64_t offset, uint8_t* to, long panels, long blocks_a_panel,
                         uint32_t* escapes) {
  const uint64_t panel = static_cast<uint64_t>(blocks_a_panel * kBlockBytes);
  Section section{Kind::kPanels, file, Source::kBf16, PackedView{}, escapes, to, 0, panel, blocks_a_panel};
  add(tensor, section, offset, static_cast<uint64_t>(panels), std::max<uint64_t>(1, kPieceBytes / panel));
}

void Loading::add_bytes(long tensor, int file, uint64_t offset, uint8_t* to, uint64_t bytes) {
  Section section{Kind::kBytes, file, Source::kBf16, PackedView{}, nullptr, to, 0, 1, 0};
  add(tensor, section, offset, bytes, kPieceBytes);
}

void Loading::add_decoded(long tensor, int file, uint64_t offset, const DecodedMatrix& matrix) {
  const long decoding = static_cast<long>(decodings_.size()), panels = matrix.panels();
  decodings_.push_back({matrix, std::vector<PanelCode>(static_cast<size_t>(panels), matrix.code), {}});
  const auto add_first = [&](uint8_t* to, uint64_t bytes) {
    Section section{Kind::kBytes, file, Source::kBf16, PackedView{}, nullptr, to, 0, 1, 0, -1, true};
    add(tensor, section, offset, bytes, kPieceBytes);
    offset += bytes;
  };
  add_first(reinterpret_cast<uint8_t*>(matrix.counts), static_cast<uint64_t>(panels) * 4);
  const long blocks = matrix.columns / kBlockColumns;
  const uint64_t panel = static_cast<uint64_t>(blocks * kBlockBytes);
  Section section{Kind::kDecoded, file, Source::kBf16, PackedView{}, nullptr, nullptr, 0, panel, blocks, decoding};
  add(tensor, section, offset, static_cast<uint64_t>(panels), std::max<uint64_t>(1, kPieceBytes / panel));
  offset += static_cast<uint64_t>(panels) * panel;
  add_first(matrix.escapes, matrix.escape_bytes);
}

void Loading::add(long tensor, const Section& section, uint64_t offset, uint64_t units, uint64_t units_a_piece) {
  if (tensor + 1 != static_cast<long>(tensor_begin_.size())) throw std::invalid_argument("only the last tensor can grow");
  sections_.push_back(section);
  tensor_of_.push_back(tensor);
  for (uint64_t unit = 0; unit < units; unit += units_a_piece) {
    const uint64_t bytes = std::min(units_a_piece, units - unit) * section.unit, begin = unit * section.unit;
    pieces_.push_back({static_cast<uint32_t>(sections_.size() - 1), offset + begin, begin, bytes});
    bytes_ += bytes;
    if (section.kind == Kind::kRows || section.kind == Kind::kDecoded) buffer_bytes_ = std::max(buffer_bytes_, bytes);
  }
}

void Loading::start(int threads) {
  checksums_.resize(pieces_.size());
  for (const bool first : {true, false}) {
    for (size_t p = 0; p < pieces_.size(); ++p)
      if (sections_[pieces_[p].section].comes_first == first) order_.push_back(p);
    uint64_t bytes = 0;
    for (size_t i = groups_.empty() ? 0 : groups_.back(); i < order_.size(); ++i) {
      bytes += pieces_[order_[i]].bytes;
      if (bytes < kGroupBytes && i + 1 < order_.size()) continue;
      groups_.push_back(i + 1);
      bytes = 0;
    }
    if (first) first_groups_ = first_groups_left_ = groups_.size();
  }
  const int wanted = static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(1, threads)), groups_.size()));
  for (int i = 0; i < wanted; ++i) buffers_.emplace_back(new uint8_t[buffer_bytes_ + 64]);
  thread_ids_.resize(static_cast<size_t>(wanted));
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the caller's, who waits
  working_ = wanted;
  for (int i = 0; i < wanted; ++i) {
    try {
      threads_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {  // the system gives no more: those that run do it all
      const std::lock_guard<std::mutex> lock(mutex_);
      working_ -= wanted - i;
      break;
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (wanted > 0 && threads_.empty()) throw std::runtime_error("the system gives no thread");
}

bool Loading::wait(double seconds) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return working_ == 0; })) return false;
  }
  join();
  return true;
}

void Loading::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_.store(true);
    changed_.notify_all();
  }
  join();
}

void Loading::join() {
  for (std::thread& thread : threads_) thread.join();
  // The system counts a thread for some moments after it was joined.
  if (!threads_.empty())
    for (const int id : thread_ids_)
      while (id != 0 && syscall(SYS_tgkill, getpid(), id, 0) == 0) sched_yield();
  threads_.clear();
  buffers_.clear();
}

void Loading::work(int worker) {
  thread_ids_[static_cast<size_t>(worker)] = static_cast<int>(syscall(SYS_gettid));
  uint8_t* buffer = buffers_[static_cast<size_t>(worker)].get();
  bool slow = false;
  while (!stopped_.load(std::memory_order_relaxed)) {
    const size_t group = next_group_.fetch_add(1);
    if (group >= groups_.size()) break;
    if (group >= first_groups_ && !first_groups_are_done()) break;
    const size_t begin = group == 0 ? 0 : groups_[group - 1];
    const Piece& first = pieces_[order_[begin]];
    if (slow)
      posix_fadvise(sections_[first.section].file, static_cast<off_t>(first.offset + kAheadBytes),
                    static_cast<off_t>(kGroupBytes), POSIX_FADV_WILLNEED);
    const auto from = std::chrono::steady_clock::now();
    uint64_t bytes = 0;
    for (size_t i = begin; i < groups_[group] && !stopped_.load(std::memory_order_relaxed); ++i) {
      const size_t p = order_[i];
      take(pieces_[p], sections_[pieces_[p].section], buffer, checksums_[p]);
      bytes += pieces_[p].bytes;
    }
    if (group < first_groups_) first_group_done();
    done_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
    slow = seconds * kMemorySpeed > static_cast<double>(bytes);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--working_ == 0) changed_.notify_all();
}

void Loading::take(const Piece& piece, const Section& section, uint8_t* buffer, Checksum& checksum) {
  uint8_t* to = section.to == nullptr ? buffer : section.to + piece.begin;
  if (!read(piece, to)) return;
  checksum = xxh3_128(to, piece.bytes);
  const long unit = static_cast<long>(piece.begin / section.unit), units = static_cast<long>(piece.bytes / section.unit);
  if (section.kind == Kind::kRows)
    pack_rows(to, section.source, section.layout, section.first + unit, units, section.cells);
  if (section.kind == Kind::kPanels)
    for (long p = 0; p < units; ++p)
      section.cells[unit + p] = count_escapes(to + static_cast<uint64_t>(p) * section.unit, section.blocks_a_panel);
  if (section.kind == Kind::kDecoded) decode(piece, section, to);
}

// Panels whose planes count as many escapes as the table says: no others are read.
void Loading::decode(const Piece& piece, const Section& section, const uint8_t* blocks) {
  const Decoding& own = decodings_[static_cast<size_t>(section.decoding)];
  const DecodedMatrix& matrix = own.matrix;
  if (own.escape_begin.back() != matrix.escape_bytes)
    return fail(piece, "damaged, its table counts other escapes than there are");
  const size_t first = piece.begin / section.unit;
  CompressedView view{blocks, matrix.escapes, own.escape_begin.data() + first, own.codes.data() + first, matrix.layout};
  view.layout.n = matrix.rows - static_cast<long>(first) * 16;
  view.layout.k = matrix.columns;
  const long steps = matrix.layout.steps() * 16;
  uint32_t* cells = matrix.cells + (matrix.row / 16 + static_cast<long>(first)) * steps + matrix.column / 2 * 16;
  for (long p = 0; p < static_cast<long>(piece.bytes / section.unit); ++p) {
    if (count_escapes(view.panel(p), section.blocks_a_panel) != matrix.counts[first + static_cast<size_t>(p)])
      return fail(piece, "damaged, the planes count other escapes than the table says");
    matrix.decode(view, p, cells + p * steps);
  }
}

void Loading::first_group_done() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--first_groups_left_ > 0) return;
  for (Decoding& own : decodings_) {
    own.escape_begin.assign(1, 0);
    for (size_t p = 0; p < own.codes.size(); ++p)
      own.escape_begin.push_back(own.escape_begin.back() + own.matrix.counts[p]);
  }
  changed_.notify_all();
}

// Waits for them; false if the load was stopped.
bool Loading::first_groups_are_done() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return first_groups_left_ == 0 || stopped_.load(); });
  return !stopped_.load();
}

bool Loading::read(const Piece& piece, uint8_t* to) {
  const int file = sections_[piece.section].file;
  for (uint64_t done = 0; done < piece.bytes;) {
    const ssize_t got = pread(file, to + done, piece.bytes - done, static_cast<off_t>(piece.offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      fail(piece, got == 0 ? "it ends before its time" : std::strerror(errno));
      return false;
    }
    done += static_cast<uint64_t>(got);
  }
  return true;
}

void Loading::fail(const Piece& piece, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ == nullptr) failure_ = std::make_unique<LoadFailure>(LoadFailure{tensor_of_[piece.section], reason});
  stopped_.store(true);
  changed_.notify_all();
}

Checksum Loading::checksum(long tensor, const std::string& text) const {
  const size_t index = static_cast<size_t>(tensor), begin = tensor_begin_.at(index);
  const size_t end = index + 1 < tensor_begin_.size() ? tensor_begin_[index + 1] : pieces_.size();
  std::string whole = text;
  for (size_t p = begin; p < end; ++p) whole.append(reinterpret_cast<const char*>(checksums_[p].data()), 16);
  return xxh3_128(whole.data(), whole.size());
}

}  // namespace penstock
