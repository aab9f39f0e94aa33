// Compressed weights in one kernel family: compiled once a family, as families/family.cpp is.
#include "compressed/compressed_gemm.hpp"

#define PS_STRING_OF(x) #x
#define PS_STRING(x) PS_STRING_OF(x)

namespace penstock {

extern const CompressedFamily PENSTOCK_COMPRESSED;
const CompressedFamily PENSTOCK_COMPRESSED = {
    PS_STRING(PENSTOCK_FAMILY), kInRegisters, linear_compressed, linear_group_compressed, embed_compressed, decode_rows,
    decode_cells,
};

}  // namespace penstock
