// Codes of a matrix, a byte each and row by row, to the layout that the kernels read.
#pragma once

#include <cstdint>

namespace penstock {

// rows: a multiple of 16; k: a multiple of 32; to: rows / 16 panels of [k / 32][64 * bits] bytes.  Any thread.
void pack_codes(const uint8_t* codes, long rows, long k, int bits, uint8_t* to);

// The same for inputs of 8 bits (quantized/int8_codes.hpp); `bytes`: what is stored for each code.
void pack_quads(const uint8_t* codes, const uint8_t* bytes, long rows, long k, int bits, uint8_t* to);

// The code of 0 if values are integers one after another (QuantPart::zero_code), or else -1; `values`: bf16 [2 ** bits].
int zero_code_of(const uint16_t* values, int bits);

}  // namespace penstock
