#include "core/linear.h"

namespace ehc {

namespace {

Linear combine(ExpressionStep::Code code, const Linear& a, const Linear& b) {
  Linear r;
  r.unknown = a.unknown >= 0 ? a.unknown : b.unknown;
  r.solvable =
      a.solvable && b.solvable && (a.unknown < 0 || b.unknown < 0 || a.unknown == b.unknown);
  bool ok = true;
  switch (code) {
    case ExpressionStep::add:
      ok = !__builtin_add_overflow(a.value, b.value, &r.value) &&
           !__builtin_add_overflow(a.slope, b.slope, &r.slope);
      break;
    case ExpressionStep::subtract:
      ok = !__builtin_sub_overflow(a.value, b.value, &r.value) &&
           !__builtin_sub_overflow(a.slope, b.slope, &r.slope);
      break;
    case ExpressionStep::multiply: {
      int64_t left = 0;
      int64_t right = 0;
      ok = !__builtin_mul_overflow(a.value, b.value, &r.value) &&
           !__builtin_mul_overflow(a.slope, b.value, &left) &&
           !__builtin_mul_overflow(a.value, b.slope, &right) &&
           !__builtin_add_overflow(left, right, &r.slope);
      if (a.unknown >= 0 && b.unknown >= 0) r.solvable = false;
      break;
    }
    case ExpressionStep::divide:  // exact, of known values
      ok = a.unknown < 0 && b.unknown < 0 && b.value != 0 && a.value % b.value == 0;
      if (ok) r.value = a.value / b.value;
      break;
    default:
      ok = false;
  }
  r.solvable = r.solvable && ok;
  return r;
}

}  // namespace

Linear evaluate(std::span<const ExpressionStep> steps, const SymbolValues& symbols) {
  Linear stack[std::tuple_size_v<decltype(Formula::steps)>];
  int top = 0;
  for (const ExpressionStep step : steps) {
    if (step.code == ExpressionStep::variable) {
      Linear& l = stack[top++];
      l = Linear{};
      if (symbols.has(step.value)) {
        l.value = symbols.value[step.value];
      } else {
        l.slope = 1;
        l.unknown = step.value;
      }
    } else if (step.code == ExpressionStep::constant) {
      stack[top] = Linear{};
      stack[top++].value = step.value;
    } else {
      stack[top - 2] = combine(step.code, stack[top - 2], stack[top - 1]);
      --top;
    }
  }
  return stack[0];
}

bool solve(const Linear& l, int64_t wanted, int64_t& x) {
  int64_t rest = 0;
  if (!l.solvable || l.slope == 0 || __builtin_sub_overflow(wanted, l.value, &rest) ||
      (rest == INT64_MIN && l.slope == -1) || rest % l.slope != 0) {
    return false;
  }
  x = rest / l.slope;
  return true;
}

}  // namespace ehc
