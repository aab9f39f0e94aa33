// From codes to cells of bf16 values, and from records to fp32 scales and minimums.
//
// A unit's bits: of four cells, 32 words of 16 bits (sixteen outputs, early and late input each) hold a nibble a cell;
// then 5 bits have 32 words with a bit a cell, 6 bits twice 32 words with two bits for each of eight cells.  8 bits are
// bytes: 64 for two cells, in the order in which unpacking bytes to words puts each into its lane.
#pragma once

#include "families/simd.hpp"
#include "quantized/quantized.hpp"

#if defined(__AVX512F__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the compiler's own headers, in release 12
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace {

using namespace penstock;

constexpr long kHighBits = 256;  // where a unit's bits beyond four begin

PS_INLINE unsigned word_at(const uint8_t* from, long index) {
  uint16_t word;
  __builtin_memcpy(&word, from + index * 2, 2);
  return word;
}

// The code of one weight: `lane` is its output, `late` its place in the cell.
PS_INLINE unsigned code_at(const uint8_t* unit, int bits, long cell, int lane, int late) {
  const long place = lane * 2 + late;
  if (bits == 8) return unit[cell / 2 * 64 + lane / 4 * 16 + cell % 2 * 8 + lane % 4 * 2 + late];
  const unsigned low = word_at(unit + cell / 4 * 64, place) >> (cell % 4 * 4) & 15;
  if (bits == 5) return low | (word_at(unit + kHighBits, place) >> cell & 1) << 4;
  if (bits == 6) return low | (word_at(unit + kHighBits + cell / 8 * 64, place) >> (cell % 8 * 2) & 3) << 4;
  return low;
}

PS_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7FFFu;
  uint32_t bits = rest >= 0x7C00u ? 0x7F800000u | rest << 13 : (rest << 13) + 0x38000000u;
  if (rest < 0x0400u) {
    const float small = static_cast<float>(rest) * 0x1p-24f;
    __builtin_memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

PS_INLINE F16 load_halves(const uint8_t* from) {
  F16 to;
#if defined(__AVX512F__)
  to.part[0] = (FloatReg)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  PS_EACH_PART to.part[i] = (FloatReg)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
#else
  float values[16];
  for (int lane = 0; lane < 16; ++lane) values[lane] = half_to_float(static_cast<uint16_t>(word_at(from, lane)));
  to = load(values);
#endif
  return to;
}

PS_INLINE I16 load_bytes(const uint8_t* from) {
  I16 to;
#if defined(__AVX512F__)
  to.part[0] = (IntReg)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  PS_EACH_PART to.part[i] = (IntReg)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * 8)));
#else
  int32_t wide[16];
  for (int lane = 0; lane < 16; ++lane) wide[lane] = from[lane];
  to = load_as<I16>(wide);
#endif
  return to;
}
PS_INLINE F16 load_unsigned(const uint8_t* from) { return to_float(load_bytes(from)); }

// Bytes of two's complement.
PS_INLINE F16 load_signed(const uint8_t* from) {
  I16 wide = load_bytes(from);
  PS_EACH_PART wide.part[i] = wide.part[i] << 24 >> 24;
  return to_float(wide);
}

// A flat scale; 2 ** (byte - 127), of which 0 is below the normal numbers and 255 is none.
template <ScaleKind kKind>
PS_INLINE F16 load_scale(const uint8_t* from) {
  if constexpr (kKind == ScaleKind::kF16) return load_halves(from);
  if constexpr (kKind == ScaleKind::kF32) return load_as<F16>(from);
  if constexpr (kKind == ScaleKind::kBf16) {
    HalfReg half[kParts];
    U16 words;
    __builtin_memcpy(half, from, 32);
    PS_EACH_PART words.part[i] = __builtin_convertvector(half[i], WordReg);
    return bits_as<F16>(words << 16);
  }
  if constexpr (kKind == ScaleKind::kU8OfF16) return load_unsigned(from);
  if constexpr (kKind == ScaleKind::kI8OfF16) return load_signed(from);
  const I16 exponent = load_bytes(from);
  const F16 normal = bits_as<F16>(bits_as<U16>(exponent) << 23);
  const F16 small = select(less(exponent, splat_int(1)), splat(0x1p-127f), normal);
  return select(less(splat_int(254), exponent), splat(__builtin_nanf("")), small);
}

PS_INLINE F16 negative(const F16& a) { return bits_as<F16>(bits_as<U16>(a) ^ splat_word(0x80000000u)); }

// Where the numbers of some pieces of one panel begin, and where they go.
struct Numbers {
  const uint8_t* record;
  long record_bytes;
  long groups;  // of a record
  long group;                          // of the record
  long inside;                         // pieces of the group that come before the first
  long pieces_a_group, pieces;
  float *scales, *mins;  // [pieces][16]; no minimums: null
};

template <ScaleKind kScale, MinKind kMin>
void expand(const Numbers& at) {
  constexpr bool kSuper = kScale == ScaleKind::kU8OfF16 || kScale == ScaleKind::kI8OfF16;
  constexpr long kBegin = kSuper ? (kMin == MinKind::kU8OfF16 ? 64 : 32) : 0;  // of the groups' own numbers
  const long step = scale_bytes(kScale) * 16, min_step = min_bytes(kMin) * 16;
  const uint8_t* record = at.record;
  float *scales = at.scales, *mins = at.mins;
  long pieces = at.pieces, group = at.group, inside = at.inside;
  while (pieces > 0) {
    F16 unit = splat(1.0f), min_unit = splat(0.0f);
    if constexpr (kSuper) unit = load_halves(record);
    if constexpr (kMin == MinKind::kU8OfF16) min_unit = negative(load_halves(record + 32));
    const uint8_t *own = record + kBegin + group * step, *own_mins = record + kBegin + at.groups * step + group * min_step;
    const auto each = [&](long i, float* to, float* min_to) {
      F16 scale = load_scale<kScale>(own + i * step), min = min_unit;
      if constexpr (kSuper) scale = unit * scale;
      if constexpr (kMin == MinKind::kU8OfF16) min = min_unit * load_unsigned(own_mins + i * min_step);
      if constexpr (kMin == MinKind::kZeroPoint) min = negative(scale) * load_unsigned(own_mins + i * min_step);
      if constexpr (kMin == MinKind::kF16) min = load_halves(own_mins + i * min_step);
      store(to, scale);
      if constexpr (kMin != MinKind::kNone) store(min_to, min);
    };
    if (at.pieces_a_group == 1) {
      const long count = at.groups - group < pieces ? at.groups - group : pieces;
      for (long i = 0; i < count; ++i) each(i, scales + i * 16, mins + i * 16);
      scales += count * 16, mins += count * 16, pieces -= count;
    } else {
      for (long i = 0; i < at.groups - group && pieces > 0; ++i, inside = 0) {
        const long left = at.pieces_a_group - inside, same = left < pieces ? left : pieces;
        for (long piece = 0; piece < same; ++piece) each(i, scales + piece * 16, mins + piece * 16);
        scales += same * 16, mins += same * 16, pieces -= same;
      }
    }
    group = 0;
    record += at.record_bytes;
  }
}

template <ScaleKind kScale>
PS_INLINE void expand_flat(MinKind min, const Numbers& at) {
  switch (min) {
    case MinKind::kZeroPoint: return expand<kScale, MinKind::kZeroPoint>(at);
    case MinKind::kF16: return expand<kScale, MinKind::kF16>(at);
    default: return expand<kScale, MinKind::kNone>(at);
  }
}

template <ScaleKind kScale>
PS_INLINE void expand_super(MinKind min, const Numbers& at) {
  if (min == MinKind::kU8OfF16) return expand<kScale, MinKind::kU8OfF16>(at);
  expand_flat<kScale>(min, at);
}

// Scales (and minimums, unless null) of pieces of `columns` (32, or 16) from a unit on; [pieces][16].
inline void expand_numbers(const QuantPart& part, long panel, long unit, long pieces, long columns, float* scales,
                           float* mins) {
  const long each = part.has_super() ? kSuperColumns / part.group : 1, column = unit * kUnitColumns;
  const long first = column / part.group;
  const Numbers at{part.record(panel, first / each), part.record_bytes(), each, first % each,
                   column % part.group / columns, part.group / columns, pieces, scales, mins};
  switch (part.scale) {
    case ScaleKind::kF16: return expand_flat<ScaleKind::kF16>(part.min, at);
    case ScaleKind::kBf16: return expand_flat<ScaleKind::kBf16>(part.min, at);
    case ScaleKind::kF32: return expand_flat<ScaleKind::kF32>(part.min, at);
    case ScaleKind::kE8m0: return expand_flat<ScaleKind::kE8m0>(part.min, at);
    case ScaleKind::kU8OfF16: return expand_super<ScaleKind::kU8OfF16>(part.min, at);
    case ScaleKind::kI8OfF16: return expand_super<ScaleKind::kI8OfF16>(part.min, at);
  }
}

// --- cells ----------------------------------------------------------------------------------------------------------

// Both values of a cell, where codes become numbers instead of patterns of bits.
struct CellValues {
  F16 early, late;
};
PS_INLINE void store(uint32_t* cells, const CellValues& cell) {
  store(cells, (bits_as<U16>(cell.early) >> 16) | bits_as<U16>(cell.late));
}

#if defined(__AVX512BW__)
PS_INLINE U16 as_cells(__m512i words) {
  U16 to;
  to.part[0] = (WordReg)words;
  return to;
}

typedef uint16_t Words __attribute__((vector_size(64)));

// Values of codes of up to six bits, held in registers.  `kChunk` cells are read at a time.
template <int kBits>
struct Decoder {
  static constexpr int kChunk = 4;
  struct Chunk {
    __m512i low, high;
  };
  __m512i table, upper;

  explicit PS_INLINE Decoder(const QuantPart& part) {
    const uint16_t* values = part.values;
    table = _mm512_loadu_si512(values);
    if constexpr (kBits == 4) {  // five bits choose: the fifth may be anything
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
      table = _mm512_inserti64x4(_mm512_castsi256_si512(half), half, 1);
    }
    upper = kBits == 6 ? _mm512_loadu_si512(values + 32) : table;
  }
  static PS_INLINE Chunk load(const uint8_t* unit, long cell) {
    Chunk chunk{_mm512_loadu_si512(unit + cell / 4 * 64), {}};
    if constexpr (kBits == 5) chunk.high = _mm512_loadu_si512(unit + kHighBits);
    if constexpr (kBits == 6) chunk.high = _mm512_loadu_si512(unit + kHighBits + cell / 8 * 64);
    return chunk;
  }
  PS_INLINE U16 cell(const Chunk& chunk, int cell) const {
    const __m512i low = (__m512i)((Words)chunk.low >> (cell % 4 * 4));
    if constexpr (kBits == 4) return as_cells(_mm512_permutexvar_epi16(low, table));
    const int place = kBits == 5 ? cell : cell % 8 * 2;  // of the high bits, which belong at bit 4
    const __m512i high = (__m512i)(place <= 4 ? (Words)chunk.high << (4 - place) : (Words)chunk.high >> (place - 4));
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xCA);  // 15 ? low : high
    if constexpr (kBits == 5) return as_cells(_mm512_permutexvar_epi16(code, table));
    return as_cells(_mm512_permutex2var_epi16(table, code, upper));
  }
};

#if defined(__AVX512VBMI__)
// Values of bytes: their lower and upper bytes looked up apart, for codes from 0 and from 128.
template <>
struct Decoder<8> {
  static constexpr int kChunk = 2;
  struct Chunk {
    __m512i low, high;
  };
  __m512i tables[2][2][2];  // lower or upper byte, codes below 128 or not, halves of those

  explicit PS_INLINE Decoder(const QuantPart& part) {
    const uint16_t* values = part.values;
    for (int byte = 0; byte < 2; ++byte)
      for (int half = 0; half < 2; ++half)
        for (int quarter = 0; quarter < 2; ++quarter) {
          uint8_t own[64];
          for (int i = 0; i < 64; ++i) own[i] = static_cast<uint8_t>(values[half * 128 + quarter * 64 + i] >> (8 * byte));
          tables[byte][half][quarter] = _mm512_loadu_si512(own);
        }
  }
  PS_INLINE __m512i look_up(int byte, __m512i codes, __mmask64 above) const {
    const __m512i below = _mm512_permutex2var_epi8(tables[byte][0][0], codes, tables[byte][0][1]);
    return _mm512_mask_blend_epi8(above, below, _mm512_permutex2var_epi8(tables[byte][1][0], codes, tables[byte][1][1]));
  }
  PS_INLINE Chunk load(const uint8_t* unit, long cell) const {
    const __m512i codes = _mm512_loadu_si512(unit + cell / 2 * 64);
    const __mmask64 above = _mm512_movepi8_mask(codes);
    return {look_up(0, codes, above), look_up(1, codes, above)};
  }
  PS_INLINE U16 cell(const Chunk& chunk, int cell) const {
    return as_cells(cell % 2 == 0 ? _mm512_unpacklo_epi8(chunk.low, chunk.high)
                                  : _mm512_unpackhi_epi8(chunk.low, chunk.high));
  }
};
#endif  // VBMI
#elif defined(__AVX2__)
// The codes of a cell are gathered into a register of bytes: in each half those of four outputs of the first eight, then
// of four of the others, early and late inputs side by side.  Unpacking them gives words in the order of a cell's lanes.

// Byte `byte` of each word of a line.
PS_INLINE __m256i bytes_of_words(const uint8_t* line, int byte) {
  const __m256i apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const auto* from = reinterpret_cast<const __m256i*>(line);
  const __m256i first = _mm256_shuffle_epi8(_mm256_loadu_si256(from), apart);
  const __m256i second = _mm256_shuffle_epi8(_mm256_loadu_si256(from + 1), apart);
  return byte == 0 ? _mm256_unpacklo_epi64(first, second) : _mm256_unpackhi_epi64(first, second);
}

PS_INLINE __m256i unpacked(__m256i lower, __m256i upper, int half) {
  return half == 0 ? _mm256_unpacklo_epi8(lower, upper) : _mm256_unpackhi_epi8(lower, upper);
}

// Four cells of codes of four to six bits.
template <int kBits>
struct CodeBytes {
  __m256i low[2], high;  // of cells 0 and 1, of 2 and 3; bits beyond four

  static PS_INLINE CodeBytes load(const uint8_t* unit, long cell) {
    CodeBytes to;
    for (int pair = 0; pair < 2; ++pair) to.low[pair] = bytes_of_words(unit + cell / 4 * 64, pair);
    to.high = to.low[0];
    if constexpr (kBits == 5) to.high = bytes_of_words(unit + kHighBits, cell / 8 == 0 ? 0 : 1);
    if constexpr (kBits == 6) to.high = bytes_of_words(unit + kHighBits + cell / 8 * 64, cell / 4 % 2 == 0 ? 0 : 1);
    return to;
  }
  PS_INLINE __m256i lowest_four(int cell) const {
    const __m256i both = low[cell / 2 % 2];
    return _mm256_and_si256(cell % 2 == 0 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  }
};

// Values of codes of four or five bits: their lower and upper bytes looked up apart.
template <int kBits>
struct Decoder {
  static constexpr int kChunk = 4;
  using Chunk = CodeBytes<kBits>;
  __m256i tables[2][2];  // lower or upper byte; without the fifth bit or with it

  explicit PS_INLINE Decoder(const QuantPart& part) {
    for (int fifth = 0; fifth < kBits - 3; ++fifth) {
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(part.values + fifth * 16));
      const __m256i bytes[2] = {_mm256_and_si256(values, _mm256_set1_epi16(255)), _mm256_srli_epi16(values, 8)};
      for (int byte = 0; byte < 2; ++byte)
        tables[byte][fifth] = _mm256_permute4x64_epi64(_mm256_packus_epi16(bytes[byte], bytes[byte]), 0x88);
    }
  }
  static PS_INLINE Chunk load(const uint8_t* unit, long cell) { return Chunk::load(unit, cell); }
  PS_INLINE __m256i look_up(int byte, __m256i low, __m256i fifth) const {
    const __m256i below = _mm256_shuffle_epi8(tables[byte][0], low);
    if constexpr (kBits == 4) return below;
    return _mm256_blendv_epi8(below, _mm256_shuffle_epi8(tables[byte][1], low), fifth);
  }
  PS_INLINE U16 cell(const Chunk& chunk, int cell) const {
    const __m256i low = chunk.lowest_four(cell), fifth = _mm256_slli_epi16(chunk.high, 7 - cell % 8);
    const __m256i lower = look_up(0, low, fifth), upper = look_up(1, low, fifth);
    U16 to;
    PS_EACH_PART to.part[i] = (WordReg)unpacked(lower, upper, i);
    return to;
  }
};

// Codes of six or eight bits as words.
template <int kBits>
struct CodeWords {
  static constexpr int kChunk = 4;
  using Chunk = CodeBytes<kBits>;

  static PS_INLINE Chunk load(const uint8_t* unit, long cell) { return Chunk::load(unit, cell); }
  static PS_INLINE __m256i words(const Chunk& chunk, int cell, int part) {
    const int up = 4 - cell % 4 * 2;
    const __m256i high = up < 0 ? _mm256_srli_epi16(chunk.high, -up) : _mm256_slli_epi16(chunk.high, up);
    const __m256i codes = _mm256_or_si256(chunk.lowest_four(cell), _mm256_and_si256(high, _mm256_set1_epi8(48)));
    return unpacked(codes, _mm256_setzero_si256(), part);
  }
};

template <>
struct CodeWords<8> {
  static constexpr int kChunk = 2;
  struct Chunk {
    __m256i codes[kParts];
  };
  static PS_INLINE Chunk load(const uint8_t* unit, long cell) {
    Chunk chunk;
    PS_EACH_PART chunk.codes[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + cell / 2 * 64) + i);
    return chunk;
  }
  static PS_INLINE __m256i words(const Chunk& chunk, int cell, int part) {
    return unpacked(chunk.codes[part], _mm256_setzero_si256(), cell % 2);
  }
};

// Values that are integers one after another are computed.
template <int kBits>
struct IntegerDecoder : CodeWords<kBits> {
  using Chunk = typename CodeWords<kBits>::Chunk;
  __m256i zero_code;

  explicit PS_INLINE IntegerDecoder(const QuantPart& part)
      : zero_code(_mm256_set1_epi16(static_cast<short>(part.zero_code))) {}
  PS_INLINE CellValues cell(const Chunk& chunk, int cell) const {
    CellValues to;
    PS_EACH_PART {
      const __m256i values = _mm256_sub_epi16(this->words(chunk, cell, i), zero_code);
      const __m256i early = _mm256_madd_epi16(values, _mm256_set1_epi32(1));  // its sign goes up
      to.early.part[i] = (FloatReg)_mm256_cvtepi32_ps(early);
      to.late.part[i] = (FloatReg)_mm256_cvtepi32_ps(_mm256_srai_epi32(values, 16));
    }
    return to;
  }
};

// Any values (E4M3) are fetched one by one; sixteen look-ups of sixteen values each are no faster.
template <int kBits>
struct GatherDecoder : CodeWords<kBits> {
  using Chunk = typename CodeWords<kBits>::Chunk;
  alignas(32) uint32_t table[1 << kBits];  // as floats

  explicit PS_INLINE GatherDecoder(const QuantPart& part) {
    for (int i = 0; i < 1 << kBits; ++i) table[i] = static_cast<uint32_t>(part.values[i]) << 16;
  }
  PS_INLINE __m256 gather(__m256i codes) const {
    return _mm256_i32gather_ps(reinterpret_cast<const float*>(table), codes, 4);
  }
  PS_INLINE CellValues cell(const Chunk& chunk, int cell) const {
    CellValues to;
    PS_EACH_PART {
      const __m256i codes = this->words(chunk, cell, i);
      to.early.part[i] = (FloatReg)gather(_mm256_and_si256(codes, _mm256_set1_epi32(0xFFFF)));
      to.late.part[i] = (FloatReg)gather(_mm256_srli_epi32(codes, 16));
    }
    return to;
  }
};
#endif

// All cells of units [unit, unit + units) of a panel, to [units * 16][16].
template <class Own>
PS_INLINE void decode_by(const QuantPart& part, long panel, long unit, long units, uint32_t* cells) {
  const Own decoder(part);
  for (long u = unit; u < unit + units; ++u, cells += kUnitCells * 16) {
    const uint8_t* codes = part.unit(panel, u);
    _Pragma("GCC unroll 16") for (int cell = 0; cell < kUnitCells; cell += Own::kChunk) {
      const auto chunk = decoder.load(codes, cell);
      _Pragma("GCC unroll 4") for (int j = 0; j < Own::kChunk; ++j)
          store(cells + (cell + j) * 16, decoder.cell(chunk, cell + j));
    }
  }
}

inline void decode_one_by_one(const QuantPart& part, long panel, long unit, long units, uint32_t* cells) {
  for (long u = unit; u < unit + units; ++u, cells += kUnitCells * 16) {
    const uint8_t* codes = part.unit(panel, u);
    for (long cell = 0; cell < kUnitCells; ++cell)
      for (int lane = 0; lane < 16; ++lane) {
        const uint32_t early = part.values[code_at(codes, part.bits, cell, lane, 0)];
        const uint32_t late = part.values[code_at(codes, part.bits, cell, lane, 1)];
        cells[cell * 16 + lane] = early | late << 16;
      }
  }
}

template <int kBits>
void decode_units(const QuantPart& part, long panel, long unit, long units, uint32_t* cells) {
#if defined(__AVX512VBMI__)
  decode_by<Decoder<kBits>>(part, panel, unit, units, cells);
#elif defined(__AVX512BW__)
  if constexpr (kBits < 8) return decode_by<Decoder<kBits>>(part, panel, unit, units, cells);
  decode_one_by_one(part, panel, unit, units, cells);
#elif defined(__AVX2__)
  if constexpr (kBits < 6) return decode_by<Decoder<kBits>>(part, panel, unit, units, cells);
  if constexpr (kBits >= 6) {
    if (part.zero_code >= 0) return decode_by<IntegerDecoder<kBits>>(part, panel, unit, units, cells);
    decode_by<GatherDecoder<kBits>>(part, panel, unit, units, cells);
  }
#else
  decode_one_by_one(part, panel, unit, units, cells);
#endif
}

}  // namespace
