#include "core/shape_expression.h"

#include <gtest/gtest.h>

#include "core/linear.h"

namespace ehc {
namespace {

SymbolValues values(std::initializer_list<std::pair<std::string_view, int64_t>> list) {
  SymbolValues v;
  for (const auto& [name, value] : list) v.set(symbol(name), value);
  return v;
}

// -1: none.
int64_t value_of(std::string_view text, const SymbolValues& symbols) {
  const Linear v = evaluate(parse::expression(text), symbols);
  return v.solvable && v.unknown < 0 ? v.value : -1;
}

// Parsing happens at compile time in operator tables.
static_assert(parse::shape("[T,n,d]").rank == 3);
static_assert(parse::shape("[]").rank == 0);
static_assert(parse::shape("[T,n,d]").leads_with_tokens());
static_assert(!parse::shape("[n,T]").leads_with_tokens());
static_assert(!parse::shape("[T+1]").leads_with_tokens());
static_assert(parse::expression("G?").optional_axis && parse::expression("G?").is_symbol());

TEST(ShapeExpression, EvaluatesWithTheUsualPrecedence) {
  const SymbolValues v = values({{"n", 4}, {"w", 5}, {"dilation", 3}, {"hd", 64}, {"group", 32}});
  EXPECT_EQ(value_of("n+1", v), 5);
  EXPECT_EQ(value_of("n*n+2*n", v), 24);
  EXPECT_EQ(value_of("(w-1)*dilation", v), 12);
  EXPECT_EQ(value_of("w-1*dilation", v), 2);
  EXPECT_EQ(value_of("w-1-1", v), 3) << "left to right";
  EXPECT_EQ(value_of("hd/group", v), 2);
  EXPECT_EQ(value_of("3", v), 3);
}

TEST(ShapeExpression, CountsOfOperationsMayBeLonger) {
  constexpr auto kFormula = parse::expression<Formula>("T*((2*repeat-1)*(2*n*n+n)+4*n*n)");
  const Linear v = evaluate(kFormula, values({{"T", 5}, {"repeat", 20}, {"n", 4}}));
  EXPECT_TRUE(v.solvable);
  EXPECT_EQ(v.value, 5 * 1468);
}

TEST(ShapeExpression, SaysWhenThereIsNoValue) {
  EXPECT_EQ(value_of("n+1", {}), -1);
  EXPECT_EQ(value_of("hd/group", values({{"hd", 33}, {"group", 32}})), -1);
  EXPECT_EQ(value_of("hd/group", values({{"hd", 33}, {"group", 0}})), -1);
  EXPECT_EQ(value_of("n*d", values({{"n", INT64_MAX}, {"d", 2}})), -1);
}

TEST(ShapeExpression, IsSolvedForItsOneUnknown) {
  const SymbolValues v = values({{"dilation", 3}});
  const auto solution = [&](std::string_view text, int64_t wanted) {
    int64_t x = -1;
    return solve(evaluate(parse::expression(text), v), wanted, x) ? x : -1;
  };
  EXPECT_EQ(solution("n+1", 5), 4);
  EXPECT_EQ(solution("(w-1)*dilation", 9), 4);
  EXPECT_EQ(solution("(w-1)*dilation", 10), -1) << "no integer";
  EXPECT_EQ(solution("n*n+2*n", 24), -1) << "not linear";
  EXPECT_EQ(solution("n*d", 24), -1) << "two unknowns";
}

TEST(ShapeExpression, MalformedTextThrows) {
  for (const char* text : {"", "n+", "(n", "n)", "n n", "nope", "n?+1", "n+n+n+n+n+n"}) {
    EXPECT_ANY_THROW((void)parse::expression(text)) << text;
  }
  for (const char* text : {"", "T,n", "[T", "[T,,n]", "[T,n,d,w,L,C]"}) {
    EXPECT_ANY_THROW((void)parse::shape(text)) << text;
  }
}

TEST(ShapeExpression, EverySymbolHasOneName) {
  for (int i = 0; i < kSymbolCount; ++i) {
    EXPECT_EQ(symbol(kSymbols[i].name), i);
    EXPECT_LE(kSymbols[i].least, kSymbols[i].most);
  }
}

}  // namespace
}  // namespace ehc
