// A quantized weight as Python hands it over, checked once.  Included by the binding only.
#pragma once

#include <memory>
#include <vector>

#include "gemm/packing.hpp"
#include "python/arguments.hpp"
#include "quantized/quantized.hpp"
#include "quantized/quantized_packing.hpp"

namespace penstock {

// A quantized weight over memory that Python owns: parts are added from the first row to the last.
struct QuantWeights {
  struct Values {
    alignas(64) uint16_t bf16[256] = {};
  };

  std::vector<QuantPart> parts;
  std::vector<std::unique_ptr<Values>> values;
  std::vector<std::unique_ptr<IntegerCodes>> integers;  // of each part, if inputs are quantized to 8 bits
  std::vector<In<uint8_t, 1>> memory;
  std::vector<int32_t> order;
  PackedView layout;

  QuantWeights(long n, long k, const std::vector<long>& ends)
      : layout(packed_layout(n, k, ends.data(), static_cast<int>(ends.size()), 2)) {
    require(k % kUnitColumns == 0, "K must be a multiple of 32");
    for (const long end : ends) require(end % kUnitColumns == 0, "segments must end with a unit");
  }

  QuantWeights(const QuantWeights&) = delete;
  QuantWeights& operator=(const QuantWeights&) = delete;

  // `numbers`: scale kind, minimum kind, columns of a group.
  void add_part(const In<uint8_t, 1>& codes, const In<uint8_t, 1>& scales, const In<uint16_t, 1>& table, long rows,
                int bits, std::tuple<int, int, long> numbers) {
    const auto [scale, min, group] = numbers;
    require(bits == 4 || bits == 5 || bits == 6 || bits == 8, "codes have 4, 5, 6 or 8 bits");
    require(scale >= 0 && scale <= static_cast<int>(ScaleKind::kI8OfF16), "no such kind of scale");
    require(min >= 0 && min <= static_cast<int>(MinKind::kU8OfF16), "no such kind of minimum");
    require(group == 16 || (group > 0 && group % kUnitColumns == 0), "groups have 16 or a multiple of 32 columns");
    const long done = covered();
    require(rows > 0 && done % 16 == 0 && done + rows <= layout.n, "parts fill their panels, all but the last");
    require(dim(table, 0) == 1L << bits, "a value for every code");
    QuantPart part{codes.data(), scales.data(), nullptr, bits, group, static_cast<ScaleKind>(scale),
                   static_cast<MinKind>(min), done / 16, (rows + 15) / 16, layout.k / kUnitColumns};
    require(part.has_super() || part.min != MinKind::kU8OfF16, "integer minimums need super-blocks");
    require(!part.has_super() || kSuperColumns % group == 0, "groups must fill super-blocks");
    require(dim(codes, 0) == part.panels * part.panel_bytes(), "codes do not fit the part");
    require(dim(scales, 0) == part.panels * part.records() * part.record_bytes(), "scales do not fit the part");
    values.push_back(std::make_unique<Values>());
    std::copy_n(table.data(), table.size(), values.back()->bf16);
    part.values = values.back()->bf16;
    part.zero_code = zero_code_of(part.values, bits);
    parts.push_back(part);
    rows_ += rows;
    memory.insert(memory.end(), {codes, scales});
  }

  // The last part's codes lie in quads and stand for integers: kind, unit, offset, and a table of 16.
  void set_integers(std::tuple<int, float, int> numbers, const In<int8_t, 1>& table) {
    const auto [kind, unit, offset] = numbers;
    require(!parts.empty() && integers.size() + 1 == parts.size(), "integers follow the part that they belong to");
    require(kind >= 0 && kind <= static_cast<int>(CodeKind::kTable), "no such kind of integers");
    require(dim(table, 0) == 16, "a table has 16 integers");
    require(offset >= -128 && offset <= 128, "the offset is too large");
    auto own = std::make_unique<IntegerCodes>(IntegerCodes{static_cast<CodeKind>(kind), unit, offset, {}});
    require((own->kind == CodeKind::kByte) == (parts.back().bits == 8), "bytes are codes of 8 bits");
    require(own->kind != CodeKind::kTable || parts.back().bits == 4, "tables are for 4 bits");
    std::copy_n(table.data(), 16, own->table);
    parts.back().integers = own.get();
    integers.push_back(std::move(own));
  }

  // Columns of codes are multiplied with these inputs.
  void set_order(const In<int32_t, 1>& inputs) {
    require(dim(inputs, 0) == layout.k, "the order must have every column");
    std::vector<bool> seen(static_cast<size_t>(layout.k));
    for (long i = 0; i < layout.k; ++i) {
      const int32_t input = inputs.data()[i];
      require(input >= 0 && input < layout.k && !seen[static_cast<size_t>(input)], "the order must have every column once");
      seen[static_cast<size_t>(input)] = true;
    }
    order.assign(inputs.data(), inputs.data() + layout.k);
  }

  QuantView view() const {
    require(covered() == layout.n, "the parts must have all rows");
    require(integers.empty() || integers.size() == parts.size(), "all parts have integers, or none");
    const int32_t* columns = order.empty() ? nullptr : order.data();
    return {parts.data(), static_cast<long>(parts.size()), layout, columns, !integers.empty()};
  }

 private:
  long rows_ = 0;
  long covered() const { return rows_; }
};

}  // namespace penstock
