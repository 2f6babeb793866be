// Values of dimension expressions while symbols are being bound, and the relations between symbols.
#pragma once

#include <span>

#include "core/shape_expression.h"

namespace ehc {

// An expression as slope * x + value, where x is the one unbound symbol.
struct Linear {
  int64_t slope = 0;
  int64_t value = 0;
  int unknown = -1;      // the symbol x; -1: none, and the expression is `value`
  bool solvable = true;  // false: not linear, an overflow, or a division with a remainder
};

Linear evaluate(std::span<const ExpressionStep> steps, const SymbolValues& symbols);

template <size_t Steps>
Linear evaluate(const BasicExpression<Steps>& expression, const SymbolValues& symbols) {
  return evaluate(std::span(expression.steps).first(expression.count), symbols);
}

// The x for which the expression is `wanted`, if there is one.
bool solve(const Linear& expression, int64_t wanted, int64_t& x);

// C = (Nmax-1)*Kh and its like: a symbol that follows from others of the same table.
struct Relation {
  Symbol result;
  Expression expression;
  uint32_t needs = 0;  // the symbols of the expression

  constexpr Relation(std::string_view result_name, std::string_view text)
      : result(symbol(result_name)), expression(parse::expression(text)) {
    for (uint8_t i = 0; i < expression.count; ++i) {
      const ExpressionStep step = expression.steps[i];
      if (step.code == ExpressionStep::variable) needs |= 1U << step.value;
    }
  }
};
inline constexpr Relation kRelations[] = {
    {"K", "n*d"},
    {"N", "n*n+2*n"},
    {"C", "(Nmax-1)*Kh"},
};

}  // namespace ehc
