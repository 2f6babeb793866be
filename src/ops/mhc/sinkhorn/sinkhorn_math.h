// The Sinkhorn iteration of one matrix, or of as many as a V has lanes: V is float, double or a
// vector with the same operations. Element [i,o] stands at i*n + o, a line is a row or a column.
// kStreams is n where it is known to the compiler, else 0.
//
//   half-step   y' = y / D,  D = s + eps or max(s, eps),  s = sum of y over the line
//   backwards   g = (g' - w) / D,  w = sum of g' y' over the line, or 0 where D is a clamped sum;
//               y = y' D
//   on logarithms, with potentials a of rows and b of columns: x = logit - a - b,
//               a = log sum exp(logit - b) over the row; g = g' - exp(x) * sum of g' over the line
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/host_device.h"
#include "ops/mhc/shared/pairwise_sum.h"
#include "ops/mhc/sinkhorn/sinkhorn_args.h"

#if defined(__CUDA_ARCH__)
#define EHC_UNROLL_STREAMS _Pragma("unroll")
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define EHC_UNROLL_STREAMS _Pragma("GCC unroll 8")
#else
#define EHC_UNROLL_STREAMS
#endif

namespace ehc::mhc {

// --- what a V has to have, for float and double; `add` is that of pairwise_sum.h ---

template <class Real>
concept Scalar = std::is_floating_point_v<Real>;

template <Scalar V>
EHC_HD V sub(V x, V y) {
  return x - y;
}
template <Scalar V>
EHC_HD V mul(V x, V y) {
  return x * y;
}
template <Scalar V>
EHC_HD V div(V x, V y) {
  return x / y;
}
template <Scalar V>
EHC_HD V exp_nonpositive(V x) {
  return std::exp(x);
}
// log(x) for x in 1 .. n
template <Scalar V>
EHC_HD V log_of_sum(V x) {
  return std::log(x);
}
// The larger one; `x` when it is NaN.
template <Scalar V>
EHC_HD V max_keep_nan(V bound, V x) {
  return bound > x ? bound : x;
}
template <Scalar V>
EHC_HD V select_negative(V x, V negative, V positive) {
  return x < V(0) ? negative : positive;
}

// --- the iteration ---

inline constexpr int kMaxRepeat = 64;
inline constexpr int kMaxMatrix = kMaxStreams * kMaxStreams;

template <class V>
struct SinkhornConstants {
  V zero, one, eps;
};

template <bool kRows>
EHC_HD int64_t element_of_line(int64_t line, int64_t at, int64_t n) {
  return kRows ? line * n + at : at * n + line;
}

// The sum over a line of term(at, element).
template <bool kRows, class V, class Term>
EHC_HD V line_sum(int64_t line, int64_t n, const Term& term) {
  V sum = term(0, element_of_line<kRows>(line, 0, n));
  EHC_UNROLL_STREAMS for (int64_t at = 1; at < n; ++at) {
    sum = add(sum, term(at, element_of_line<kRows>(line, at, n)));
  }
  return sum;
}

// D of a line with this sum.
template <class V>
EHC_HD V sinkhorn_divisor(const SinkhornRule& rule, const SinkhornConstants<V>& constants, V sum) {
  return rule.form == SinkhornForm::megatron ? max_keep_nan(constants.eps, sum)
                                             : add(sum, constants.eps);
}

// What the way back has of it: D, negative where it is a clamped sum.
template <class V>
EHC_HD V sinkhorn_kept(const SinkhornRule& rule, const SinkhornConstants<V>& constants, V sum,
                       V divisor) {
  return rule.form == SinkhornForm::megatron
             ? select_negative(sub(sum, constants.eps), sub(constants.zero, divisor), divisor)
             : divisor;
}

// The part of a line in a half-step. `kept`, or null, takes what the way back needs.
// `division(D)` returns what divides by D.
template <bool kRows, class V, class Division>
EHC_HD void sinkhorn_line(const SinkhornRule& rule, const SinkhornConstants<V>& constants,
                          const Division& division, int64_t line, int64_t n, V* y, V* kept) {
  const V sum = line_sum<kRows, V>(line, n, [&](int64_t, int64_t e) { return y[e]; });
  const V divisor = sinkhorn_divisor(rule, constants, sum);
  if (kept != nullptr) *kept = sinkhorn_kept(rule, constants, sum, divisor);
  const auto quotient = division(divisor);
  EHC_UNROLL_STREAMS for (int64_t at = 0; at < n; ++at) {
    V& x = y[element_of_line<kRows>(line, at, n)];
    x = quotient(x);
  }
}

// One half-step. `divisors` [n] or null.
template <int kStreams, bool kRows, class V, class Division>
EHC_HD void sinkhorn_half_step(const SinkhornRule& rule, const SinkhornConstants<V>& constants,
                               const Division& division, V* y, V* divisors) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  EHC_UNROLL_STREAMS for (int64_t line = 0; line < n; ++line) {
    sinkhorn_line<kRows>(rule, constants, division, line, n, y,
                         divisors == nullptr ? nullptr : divisors + line);
  }
}

// Of a line on the way back: w, which is none where D is a clamped sum, and D from what was kept.
template <class V>
EHC_HD void sinkhorn_unclamp(const SinkhornRule& rule, const SinkhornConstants<V>& constants,
                             V& pulled, V& divisor) {
  if (rule.form != SinkhornForm::megatron) return;
  pulled = select_negative(divisor, constants.zero, pulled);
  divisor = select_negative(divisor, sub(constants.zero, divisor), divisor);
}

// A half-step backwards, of the gradient and of the iterate.
template <int kStreams, bool kRows, class V>
EHC_HD void sinkhorn_half_step_back(const SinkhornRule& rule, const SinkhornConstants<V>& constants,
                                    const V* divisors, V* y, V* grad) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  EHC_UNROLL_STREAMS for (int64_t line = 0; line < n; ++line) {
    V divisor = divisors[line];
    V pulled = line_sum<kRows, V>(line, n, [&](int64_t, int64_t e) { return mul(grad[e], y[e]); });
    sinkhorn_unclamp(rule, constants, pulled, divisor);
    const V reciprocal = div(constants.one, divisor);
    EHC_UNROLL_STREAMS for (int64_t at = 0; at < n; ++at) {
      const int64_t e = element_of_line<kRows>(line, at, n);
      grad[e] = mul(sub(grad[e], pulled), reciprocal);
      y[e] = mul(y[e], divisor);
    }
  }
}

// The largest term(at, element) of a line.
template <bool kRows, class V, class Term>
EHC_HD V line_maximum(int64_t line, int64_t n, const Term& term) {
  V largest = term(0, element_of_line<kRows>(line, 0, n));
  EHC_UNROLL_STREAMS for (int64_t at = 1; at < n; ++at) {
    largest = max_keep_nan(largest, term(at, element_of_line<kRows>(line, at, n)));
  }
  return largest;
}

// What the half-steps start from, but for eps: exp(logit - row maximum), of deepseek over its sum.
// Row i of it.
template <class V>
EHC_HD void sinkhorn_start_row(const SinkhornRule& rule, int64_t i, int64_t n, const V* logits,
                               V* y) {
  const V largest = line_maximum<true, V>(i, n, [&](int64_t, int64_t e) { return logits[e]; });
  EHC_UNROLL_STREAMS for (int64_t o = 0; o < n; ++o) {
    y[i * n + o] = exp_nonpositive(sub(logits[i * n + o], largest));
  }
  if (rule.form != SinkhornForm::deepseek) return;
  const V sum = line_sum<true, V>(i, n, [&](int64_t, int64_t e) { return y[e]; });
  EHC_UNROLL_STREAMS for (int64_t o = 0; o < n; ++o) y[i * n + o] = div(y[i * n + o], sum);
}

template <int kStreams, class V>
EHC_HD void sinkhorn_start(const SinkhornRule& rule, const V* logits, V* y) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  EHC_UNROLL_STREAMS for (int64_t i = 0; i < n; ++i) sinkhorn_start_row(rule, i, n, logits, y);
}

// The gradient of the logits, given that of what sinkhorn_start made: `start`.
template <int kStreams, class V>
EHC_HD void sinkhorn_start_back(const SinkhornRule& rule, const V* start, V* grad) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  EHC_UNROLL_STREAMS for (int64_t i = 0; i < n; ++i) {
    const bool is_softmax = rule.form == SinkhornForm::deepseek;
    const V pulled =
        line_sum<true, V>(i, n, [&](int64_t, int64_t e) { return mul(grad[e], start[e]); });
    EHC_UNROLL_STREAMS for (int64_t o = 0; o < n; ++o) {
      V& g = grad[i * n + o];
      g = mul(is_softmax ? sub(g, pulled) : g, start[i * n + o]);
    }
  }
}

// --- on logarithms ---

// log sum exp of the terms x(at, element) of a line.
template <bool kRows, class V, class Term>
EHC_HD V sinkhorn_potential(int64_t line, int64_t n, const Term& x) {
  const V largest = line_maximum<kRows, V>(line, n, x);
  const V sum = line_sum<kRows, V>(
      line, n, [&](int64_t at, int64_t e) { return exp_nonpositive(sub(x(at, e), largest)); });
  return add(largest, log_of_sum(sum));
}

// The potentials of the rows (or columns), given those of the others.
template <int kStreams, bool kRows, class V>
EHC_HD void sinkhorn_log_half_step(const SinkhornRule& rule, const V* logits, const V* others,
                                   V* potentials) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  EHC_UNROLL_STREAMS for (int64_t line = 0; line < n; ++line) {
    potentials[line] = sinkhorn_potential<kRows, V>(
        line, n, [&](int64_t at, int64_t e) { return sub(logits[e], others[at]); });
  }
}

// exp(logit - row potential - column potential)
template <int kStreams, class V>
EHC_HD void sinkhorn_log_iterate(const SinkhornRule& rule, const V* logits, const V* of_rows,
                                 const V* of_columns, V* y) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  EHC_UNROLL_STREAMS for (int64_t i = 0; i < n; ++i) {
    EHC_UNROLL_STREAMS for (int64_t o = 0; o < n; ++o) {
      y[i * n + o] = exp_nonpositive(sub(sub(logits[i * n + o], of_rows[i]), of_columns[o]));
    }
  }
}

// `y` is the iterate after the half-step; `grad` is that of its logarithm.
template <int kStreams, bool kRows, class V>
EHC_HD void sinkhorn_log_half_step_back(const SinkhornRule& rule, const V* y, V* grad) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  EHC_UNROLL_STREAMS for (int64_t line = 0; line < n; ++line) {
    const V pulled = line_sum<kRows, V>(line, n, [&](int64_t, int64_t e) { return grad[e]; });
    EHC_UNROLL_STREAMS for (int64_t at = 0; at < n; ++at) {
      const int64_t e = element_of_line<kRows>(line, at, n);
      grad[e] = sub(grad[e], mul(y[e], pulled));
    }
  }
}

// --- whole passes ---

// Rows, then columns; `divisors` [2n] or null.
template <int kStreams, class V, class Division>
EHC_HD void sinkhorn_round(const SinkhornRule& rule, const SinkhornConstants<V>& constants,
                           const Division& division, V* y, V* divisors) {
  V* of_columns = divisors == nullptr ? nullptr : divisors + rule.streams;
  sinkhorn_half_step<kStreams, true>(rule, constants, division, y, divisors);
  sinkhorn_half_step<kStreams, false>(rule, constants, division, y, of_columns);
}

// The rounds of a row and a column step each. deepseek has a column step before them, for its
// softmax is the row step of its first round.
EHC_HD bool begins_with_columns(const SinkhornRule& rule) {
  return rule.form == SinkhornForm::deepseek;
}
EHC_HD int64_t whole_rounds(const SinkhornRule& rule) {
  return begins_with_columns(rule) ? rule.repeat - 1 : rule.repeat;
}

// `run_rounds(y, divisors)` does the whole rounds; `divisors` [repeat, 2, n] or null.
template <int kStreams, class V, class Division, class RunRounds>
EHC_HD void sinkhorn_iterate(const SinkhornRule& rule, const SinkhornConstants<V>& constants,
                             const Division& division, const RunRounds& run_rounds, V* y,
                             V* divisors) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  if (begins_with_columns(rule)) {
    for (int64_t e = 0; e < n * n; ++e) y[e] = add(y[e], constants.eps);
    V* of_columns = divisors == nullptr ? nullptr : divisors + n;
    sinkhorn_half_step<kStreams, false>(rule, constants, division, y, of_columns);
    if (divisors != nullptr) divisors += 2 * n;
  }
  run_rounds(y, divisors);
}

// Back from the last iterate `y` to the gradient of the logits. `start`: see sinkhorn_start.
template <int kStreams, class V>
EHC_HD void sinkhorn_iterate_back(const SinkhornRule& rule, const SinkhornConstants<V>& constants,
                                  const V* divisors, const V* start, V* y, V* grad) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  for (int64_t round = rule.repeat - 1; round >= 0; --round) {
    const V* of_round = divisors + round * 2 * n;
    sinkhorn_half_step_back<kStreams, false>(rule, constants, of_round + n, y, grad);
    if (round == 0 && begins_with_columns(rule)) break;
    sinkhorn_half_step_back<kStreams, true>(rule, constants, of_round, y, grad);
  }
  sinkhorn_start_back<kStreams>(rule, start, grad);
}

// `potentials` [2*repeat + 1, n]: zeros, then those of every half-step.
template <int kStreams, class V>
EHC_HD void sinkhorn_log_iterate_all(const SinkhornRule& rule,
                                     const SinkhornConstants<V>& constants, const V* logits,
                                     V* potentials) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  for (int64_t line = 0; line < n; ++line) potentials[line] = constants.zero;
  for (int64_t round = 0; round < rule.repeat; ++round, potentials += 2 * n) {
    V* of_rows = potentials + n;
    sinkhorn_log_half_step<kStreams, true>(rule, logits, potentials, of_rows);
    sinkhorn_log_half_step<kStreams, false>(rule, logits, of_rows, of_rows + n);
  }
}

// `y` is room for an iterate; `grad` of comb becomes that of the logits.
template <int kStreams, class V>
EHC_HD void sinkhorn_log_back(const SinkhornRule& rule, const V* logits, const V* potentials, V* y,
                              V* grad) {
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  for (int64_t step = 2 * rule.repeat; step > 0; step -= 2) {
    const V* of_columns = potentials + step * n;
    const V* of_rows = of_columns - n;
    sinkhorn_log_iterate<kStreams>(rule, logits, of_rows, of_columns, y);
    if (step == 2 * rule.repeat) {
      for (int64_t e = 0; e < n * n; ++e) grad[e] = mul(grad[e], y[e]);
    }
    sinkhorn_log_half_step_back<kStreams, false>(rule, y, grad);
    sinkhorn_log_iterate<kStreams>(rule, logits, of_rows, of_rows - n, y);
    sinkhorn_log_half_step_back<kStreams, true>(rule, y, grad);
  }
}

// --- one matrix from end to end, for scalars ---

template <class V>
struct ScalarDivision {
  EHC_HD auto operator()(V divisor) const {
    return [divisor](V x) { return x / divisor; };
  }
};

template <Scalar V>
EHC_HD SinkhornConstants<V> sinkhorn_constants(const SinkhornRule& rule) {
  return {V(0), V(1), V(rule.eps)};
}

// Rounds [first, last); `divisors` of round 0, or null.
template <int kStreams, Scalar V, class Division>
EHC_HD void sinkhorn_some_rounds(const SinkhornRule& rule, const Division& division, int64_t first,
                                 int64_t last, V* y, V* divisors) {
  for (int64_t round = first; round < last; ++round) {
    V* of_round = divisors == nullptr ? nullptr : divisors + round * 2 * rule.streams;
    sinkhorn_round<kStreams>(rule, sinkhorn_constants<V>(rule), division, y, of_round);
  }
}

// The `run_rounds` of plain loops.
template <int kStreams, Scalar V>
struct PlainRounds {
  const SinkhornRule& rule;

  EHC_HD void operator()(V* y, V* divisors) const {
    sinkhorn_some_rounds<kStreams>(rule, ScalarDivision<V>{}, 0, whole_rounds(rule), y, divisors);
  }
};

// From what sinkhorn_start made to the last iterate; `divisors` [repeat, 2, n] or null.
template <int kStreams, Scalar V, class RunRounds>
EHC_HD void sinkhorn_iterate_scalars(const SinkhornRule& rule, const RunRounds& run_rounds, V* y,
                                     V* divisors) {
  sinkhorn_iterate<kStreams>(rule, sinkhorn_constants<V>(rule), ScalarDivision<V>{}, run_rounds, y,
                             divisors);
}

// comb of logits
template <int kStreams, Scalar V, class RunRounds>
EHC_HD void sinkhorn_matrix(const SinkhornRule& rule, const RunRounds& run_rounds, const V* logits,
                            V* y) {
  if (rule.form != SinkhornForm::log) {
    sinkhorn_start<kStreams>(rule, logits, y);
    sinkhorn_iterate_scalars<kStreams, V>(rule, run_rounds, y, nullptr);
    return;
  }
  constexpr int kLines = kStreams == 0 ? kMaxStreams : kStreams;
  V of_rows[kLines];
  V of_columns[kLines];
  for (int64_t line = 0; line < kLines; ++line) of_columns[line] = 0;
  for (int64_t round = 0; round < rule.repeat; ++round) {
    sinkhorn_log_half_step<kStreams, true>(rule, logits, of_columns, of_rows);
    sinkhorn_log_half_step<kStreams, false>(rule, logits, of_rows, of_columns);
  }
  sinkhorn_log_iterate<kStreams>(rule, logits, of_rows, of_columns, y);
}

// Room for what the way back needs of the way there: divisors or potentials.
template <int kStreams, int kRepeat>
inline constexpr int kSinkhornTrace = (2 * kRepeat + 1) * (kStreams == 0 ? kMaxStreams : kStreams);

// `grad` of comb becomes that of the logits; `trace` has kSinkhornTrace.
template <int kStreams, Scalar V, class RunRounds>
EHC_HD void sinkhorn_matrix_back(const SinkhornRule& rule, const RunRounds& run_rounds,
                                 const V* logits, V* trace, V* grad) {
  constexpr int kRoom = kStreams == 0 ? kMaxMatrix : kStreams * kStreams;
  const SinkhornConstants<V> constants = sinkhorn_constants<V>(rule);
  V y[kRoom];
  if (rule.form == SinkhornForm::log) {
    sinkhorn_log_iterate_all<kStreams>(rule, constants, logits, trace);
    sinkhorn_log_back<kStreams>(rule, logits, trace, y, grad);
    return;
  }
  V start[kRoom];
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  sinkhorn_start<kStreams>(rule, logits, start);
  for (int64_t e = 0; e < n * n; ++e) y[e] = start[e];
  sinkhorn_iterate_scalars<kStreams, V>(rule, run_rounds, y, trace);
  sinkhorn_iterate_back<kStreams>(rule, constants, trace, start, y, grad);
}

}  // namespace ehc::mhc

#undef EHC_UNROLL_STREAMS
