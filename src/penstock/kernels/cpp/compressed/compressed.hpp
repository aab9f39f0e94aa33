// Compressed weights: bf16 whose exponents are coded in three bits (docs/format.md).  What all kernel families share.
//
// A panel of sixteen outputs is a row of blocks of four inputs.  A block has 64 weights: three 64-bit planes with the
// bits of their codes, and 64 bytes with their signs and mantissas.  Eight blocks are a chunk: their planes, then their
// bytes.  Code 0 is an escape: its exponent is the panel's next escape byte.
#pragma once

#include "families/family.hpp"

namespace penstock {

constexpr long kBlockColumns = 4;
constexpr long kChunkBlocks = 8;
constexpr long kPlaneBytes = 24;  // of one block
constexpr long kMantissaBytes = 64;
constexpr long kBlockBytes = kPlaneBytes + kMantissaBytes;
constexpr long kEscapePadding = 64;  // readable bytes after the last escape

// Exponents here are rotated right by one bit: the exponent's lowest bit then is where bf16's lower byte wants it.
struct PanelCode {
  uint8_t base;  // the rotated exponent of code 0, if that were no escape
  uint8_t step;  // 1 or 255: what the exponent's upper seven bits gain (modulo 256) every two codes
};

struct BlockRef {
  const uint8_t* planes;
  const uint8_t* bytes;
};

struct CompressedView {
  const uint8_t* blocks;         // [panels][blocks_a_panel() * kBlockBytes]
  const uint8_t* escapes;        // of all panels, one after another, then kEscapePadding bytes
  const uint64_t* escape_begin;  // [panels + 1]
  const PanelCode* codes;        // [panels]
  PackedView layout;             // segments begin with a block; cells: those of a decoded copy, or null
  long decoded_from = 0;         // products of so many rows and more read that copy

  // Is a product of `rows` rows one of plain weights, those of `layout`?
  PS_EVERYWHERE bool reads_copy(long rows) const { return layout.cells != nullptr && rows >= decoded_from; }
  PS_EVERYWHERE long blocks_a_panel() const { return (layout.k + kBlockColumns - 1) / kBlockColumns; }
  PS_EVERYWHERE const uint8_t* panel(long index) const { return blocks + index * blocks_a_panel() * kBlockBytes; }
  PS_EVERYWHERE BlockRef block(long panel_index, long index) const {
    const long chunk = index / kChunkBlocks * kChunkBlocks, left = blocks_a_panel() - chunk;
    const uint8_t* from = panel(panel_index) + chunk * kBlockBytes;
    const long planes = (left < kChunkBlocks ? left : kChunkBlocks) * kPlaneBytes;
    return {from + (index - chunk) * kPlaneBytes, from + planes + (index - chunk) * kMantissaBytes};
  }
};

using CompressedLinearArgs = LinearArgsOf<CompressedView>;  // inputs are bf16
using CompressedGroup = LinearGroupOf<CompressedView>;
using CompressedEmbedArgs = EmbedArgsOf<CompressedView>;

// One family's kernels over compressed weights: the same bits as its kernels over plain ones.
struct CompressedFamily {
  const char* name;
  bool in_registers;  // decoded in front of the multiplication, never through memory, when rows are few
  void (*linear)(const CompressedLinearArgs&);
  void (*linear_group)(const CompressedGroup&);
  void (*embed)(const CompressedEmbedArgs&);
  void (*decode_rows)(const CompressedView&, long panel, uint16_t* rows);  // bf16 [outputs of the panel, k]
  // A panel of a plain weight: [k / 2][16].  Segments begin with a block, and inputs fill the last one.
  void (*decode_cells)(const CompressedView&, long panel, uint32_t* cells);
};

// The kernels for a family that this processor runs.
const CompressedFamily& compressed_family(const char* name);

}  // namespace penstock
