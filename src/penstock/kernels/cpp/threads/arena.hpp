// Memory of a step.
#pragma once

#include <cstddef>

namespace penstock {

// Memory that keeps its size from step to step, in huge pages where it is large.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  char* reserve(size_t bytes);  // old content is lost when it grows
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace penstock
