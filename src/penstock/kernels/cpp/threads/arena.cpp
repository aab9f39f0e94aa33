#include "threads/arena.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace penstock {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Arena::~Arena() { std::free(data_); }

char* Arena::reserve(size_t bytes) {
  if (bytes <= bytes_) return data_;
  std::free(data_);
  const size_t unit = bytes < kHugePage ? 4096 : kHugePage;
  bytes_ = rounded_up(bytes + bytes / 8, unit);
  data_ = static_cast<char*>(std::aligned_alloc(unit, bytes_));
  if (data_ == nullptr) {
    bytes_ = 0;
    throw std::bad_alloc();
  }
#if defined(MADV_HUGEPAGE)
  if (unit == kHugePage) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  return data_;
}

}  // namespace penstock
