#include "lora/adapters.hpp"

#include <algorithm>
#include <numeric>

namespace penstock {

// A counting sort, whose pass over the rows keeps their order.
void AdapterRun::sort(const AdapterArgs& args) {
  const long slots = args.table->slots();
  const auto adds = [&](long row) { return args.slots[row] >= 0 && !args.table->at(args.slots[row], args.site).empty(); };
  begin_.assign(static_cast<size_t>(slots) + 1, 0);
  for (long row = 0; row < args.rows; ++row)
    if (adds(row)) ++begin_[static_cast<size_t>(args.slots[row]) + 1];
  std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
  next_.assign(begin_.begin(), begin_.end() - 1);
  rows_.resize(static_cast<size_t>(begin_.back()));
  for (long row = 0; row < args.rows; ++row)
    if (adds(row)) rows_[static_cast<size_t>(next_[static_cast<size_t>(args.slots[row])]++)] = static_cast<int32_t>(row);
}

void AdapterRun::window(const AdapterArgs& args, long begin, long end) {
  const AdapterSite& site = args.table->site(args.site);
  const size_t value_bytes = compute_ == Compute::kBf16 ? 2 : 4;
  // fn(part, first row of the window, rows) for every part of every adapter here.
  const auto each_part = [&](const auto& fn) {
    for (long slot = 0; slot < args.table->slots(); ++slot) {
      const long from = std::max(begin, begin_[static_cast<size_t>(slot)]),
                 to = std::min(end, begin_[static_cast<size_t>(slot) + 1]);
      if (from >= to) continue;
      for (const AdapterPart& part : args.table->at(slot, args.site)) fn(part, from - begin, to - from);
    }
  };
  long narrow_values = 0, wide_values = 0;
  each_part([&](const AdapterPart& part, long, long rows) {
    narrow_values += rows * part.down.n;
    wide_values += rows * part.up.n;
  });
  const int32_t* rows_of = rows_.data() + begin;
  char* x = x_.reserve(static_cast<size_t>((end - begin) * site.inputs) * value_bytes);
  auto* narrow = reinterpret_cast<float*>(narrow_.reserve(static_cast<size_t>(narrow_values) * 4));
  char* inner = compute_rows_.reserve(static_cast<size_t>(narrow_values) * value_bytes);
  auto* wide = reinterpret_cast<float*>(wide_.reserve(static_cast<size_t>(wide_values) * 4));

  family_.gather({args.x, rows_of, nullptr, end - begin, site.inputs, x}, compute_);
  calls_.clear();
  float* to = narrow;
  each_part([&](const AdapterPart& part, long first, long rows) {
    calls_.push_back({x + static_cast<size_t>(first * site.inputs) * value_bytes, rows, part.down, to, false});
    to += rows * part.down.n;
  });
  family_.linear_group({calls_.data(), static_cast<long>(calls_.size())}, compute_);
  family_.to_compute(narrow, narrow_values, inner, compute_);

  calls_.clear();
  sums_.clear();
  to = wide;
  each_part([&](const AdapterPart& part, long first, long rows) {
    calls_.push_back({inner, rows, part.up, to, false});
    sums_.push_back({args.out, to, rows_of + first, rows, site.outputs, part.first, part.up.n, part.scale});
    inner += static_cast<size_t>(rows * part.down.n) * value_bytes;
    to += rows * part.up.n;
  });
  family_.linear_group({calls_.data(), static_cast<long>(calls_.size())}, compute_);
  for (const AddPartArgs& sum : sums_) family_.add_part(sum);
}

void AdapterRun::run(const AdapterArgs& args) {
  sort(args);
  const long rows = begin_.back();
  for (long begin = 0; begin < rows; begin += kWindowRows) window(args, begin, std::min(rows, begin + kWindowRows));
}

}  // namespace penstock
