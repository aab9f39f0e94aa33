// What recording asks of its caller.
#pragma once

#include <stdexcept>

namespace penstock {

inline void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace penstock
