// Codes of a matrix, a byte each and row by row, to the layout that the kernels read.
#pragma once

#include <cstdint>

namespace penstock {

// rows: a multiple of 16; k: a multiple of 32; to: rows / 16 panels of [k / 32][64 * bits] bytes.  Any thread.
void pack_codes(const uint8_t* codes, long rows, long k, int bits, uint8_t* to);

// The same for inputs of 8 bits (quantized/int8_codes.hpp); `bytes`: what is stored for each code.
void pack_quads(const uint8_t* codes, const uint8_t* bytes, long rows, long k, int bits, uint8_t* to);

}  // namespace penstock
