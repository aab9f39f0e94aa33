// bf16 weights to compressed ones, and the check that a compressed weight can be decoded.  One thread, any processor.
#pragma once

#include <array>

#include "compressed/compressed.hpp"

namespace penstock {

// How often each exponent occurs.
std::array<uint64_t, 256> count_exponents(const uint16_t* weights, size_t count);

// What a tensor's codes mean: code c is the exponent base + step * c, c from 1 to 7.
struct ExponentCode {
  int base;
  int step;  // 1, and base is even; or -1, and base is odd
};

// Is it one whose exponents all are 0 to 255?
bool is_sound(const ExponentCode& code);
PanelCode rotated(const ExponentCode& code);

// Writes [n, k] as blocks and escapes; counts[panel] becomes the number of the panel's escapes.  `escapes` must have
// room for every weight whose exponent has no code.
void encode(const uint16_t* weights, long n, long k, const ExponentCode& code, uint8_t* blocks, uint8_t* escapes,
            uint32_t* counts);

// Escapes of every panel by its planes: out[0] = 0, out[panel + 1] = their number up to and with this panel.
void sum_escapes(const CompressedView& weight, uint64_t* out);

}  // namespace penstock
