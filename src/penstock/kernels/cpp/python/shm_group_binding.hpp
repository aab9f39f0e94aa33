// penstock.kernels._native.ShmGroup: one rank's side of a group of processes on one host.
#pragma once

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>

#include "collectives/shm_group.hpp"
#include "python/binding.hpp"

namespace penstock {

using Bytes = Out<uint8_t, 1>;
using BytesIn = In<uint8_t, 1>;
using LabelWords = std::tuple<uint32_t, uint32_t, uint64_t>;  // tag, rows, bytes of the whole array

class PyShmGroup {
 public:
  PyShmGroup(Bytes memory, int rank, int ranks, size_t slot_bytes, double spin_us)
      : memory_(std::move(memory)), group_(aligned(memory_, ranks, slot_bytes), rank, ranks, slot_bytes, spin_us) {}

  static size_t bytes_needed(int ranks, size_t slot_bytes) {
    require(ranks >= 1 && ranks <= 1024, "a group has 1 to 1024 ranks");
    return ShmGroup::bytes_needed(ranks, slot_bytes);
  }

  void post(const BytesIn& piece, const LabelWords& label) { group_.post(piece.data(), label_of(piece, label)); }

  bool wait(int rank, double seconds) {
    checked(rank);
    bool found = false;
    without_gil([&] { found = group_.await(rank, seconds); });
    return found;
  }

  LabelWords label(int rank) const {
    checked(rank);
    return words(group_.label(rank));
  }

  void read(int rank, const Bytes& piece) const {
    checked(rank);
    copy(group_.label(rank), group_.data(rank), piece);
  }

  bool send(int to, const BytesIn& piece, const LabelWords& label, double seconds) {
    checked(to);
    bool sent = false;
    without_gil([&] { sent = group_.send(to, piece.data(), label_of(piece, label), seconds); });
    return sent;
  }

  bool wait_sent(int from, double seconds) {
    checked(from);
    bool found = false;
    without_gil([&] { found = group_.await_sent(from, seconds); });
    return found;
  }

  LabelWords sent_label(int from) const {
    checked(from);
    return words(group_.sent_label(from));
  }

  void receive(int from, const Bytes& piece) {
    checked(from);
    copy(group_.sent_label(from), group_.sent_data(from), piece);
    group_.release(from);
  }

  void end() { group_.end(); }
  bool over() const { return group_.over(); }
  ShmGroup& group() { return group_; }

  // Many exchanges of one piece among all ranks, who all call this: when each began, after a pause, and when it had ended.
  void time_exchanges(const BytesIn& piece, const Out<int64_t, 2>& times, double pause_us) {
    require(dim(times, 1) == 2, "times must be [exchanges, 2]");
    std::vector<char> copies(piece.size());
    const auto now = [] { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); };
    without_gil([&] {
      for (long i = 0; i < dim(times, 0); ++i) {
        for (const auto until = now() + static_cast<long>(pause_us * 1e3); now() < until;) {
        }
        times.data()[2 * i] = now();
        group_.post(piece.data(), {0, 1, piece.size(), piece.size()});
        for (int rank = 0; rank < group_.ranks(); ++rank) {
          if (rank == group_.rank()) continue;
          while (!group_.await(rank, 1.0)) {
          }
          std::memcpy(copies.data(), group_.data(rank), piece.size());
        }
        times.data()[2 * i + 1] = now();
      }
    });
  }

 private:
  static char* aligned(const Bytes& memory, int ranks, size_t slot_bytes) {
    require(ranks >= 1 && memory.size() >= bytes_needed(ranks, slot_bytes), "the memory is too small for the group");
    require(reinterpret_cast<uintptr_t>(memory.data()) % 64 == 0, "the memory must be aligned");
    return reinterpret_cast<char*>(memory.data());
  }
  void checked(int rank) const { require(rank >= 0 && rank < group_.ranks(), "no such rank"); }
  static ShmLabel label_of(const BytesIn& piece, const LabelWords& label) {
    return {std::get<0>(label), std::get<1>(label), std::get<2>(label), piece.size()};
  }
  static LabelWords words(const ShmLabel& label) { return {label.tag, label.rows, label.total}; }
  static void copy(const ShmLabel& label, const void* from, const Bytes& piece) {
    require(piece.size() == label.bytes, "a piece of another size");
    std::memcpy(piece.data(), from, label.bytes);
  }

  Bytes memory_;
  ShmGroup group_;
};

}  // namespace penstock
