// Drawing and scoring rows of logits, and the answers as Python gets them.  Included by the binding only.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "python/arguments.hpp"
#include "threads/thread_pool.hpp"

namespace penstock {

using Answer = std::tuple<int32_t, float, std::vector<std::pair<int32_t, float>>>;

inline std::vector<Answer> answers_of(std::vector<Drawn>& drawn) {
  std::vector<Answer> answers;
  for (Drawn& own : drawn) answers.emplace_back(own.token, own.logprob, std::move(own.top));
  return answers;
}

template <class Fn>
void for_rows(long rows, const Fn& fn) {
  parallel(rows, const_cast<Fn*>(&fn), [](void* f, long row, int) { (*static_cast<const Fn*>(f))(row); });
}

// One token for each row of logits [rows, vocabulary].
inline void draw_rows(const Family& family, const float* logits, long vocabulary, const std::vector<const DrawRow*>& rows,
                      std::vector<Drawn>& drawn) {
  drawn.resize(rows.size());
  for_rows(static_cast<long>(rows.size()), [&](long row) {
    drawn[static_cast<size_t>(row)] =
        draw(family, logits + row * vocabulary, vocabulary, rows[static_cast<size_t>(row)]->how);
  });
}

}  // namespace penstock
