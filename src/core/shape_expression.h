// Dimensions of the operator tables: small integer expressions over named symbols, e.g.
// "(w-1)*dilation" or "hd/group", parsed at compile time into postfix form.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace ehc {

// One name never means two axes; ranges are those of the contract, checked on every call.
struct SymbolInfo {
  std::string_view name;
  int64_t least;
  int64_t most;
};

inline constexpr int64_t kUnlimited = INT64_MAX;
inline constexpr SymbolInfo kSymbols[] = {
    {"T", 0, kUnlimited},           // tokens
    {"n", 1, 8},                    // residual streams
    {"d", 1, kUnlimited},           // width of one stream
    {"K", 1, kUnlimited},           // n * d
    {"N", 1, 80},                   // n * n + 2 * n mixes
    {"M", 1, 80},                   // any number of mix columns
    {"S", 0, kUnlimited},           // splits
    {"G", 1, kUnlimited},           // RMS groups
    {"P", 0, kUnlimited},           // partials
    {"Q", 1, 3},                    // scales
    {"L", 0, kUnlimited},           // layers
    {"Lp", 0, kUnlimited},          // layers that are followed by a post
    {"Nmax", 2, 8},                 // largest n-gram order
    {"Kh", 1, kUnlimited},          // heads per order
    {"C", 0, kUnlimited},           // rows fetched per token
    {"hd", 1, kUnlimited},          // width of a table row
    {"E", 1, kUnlimited},           // C * hd
    {"B", 0, kUnlimited},           // sequences
    {"w", 1, kUnlimited},           // convolution taps
    {"V", 0, kUnlimited},           // vocabulary
    {"rows", 0, kUnlimited},        // rows of a table
    {"U", 0, kUnlimited},           // unique rows (capacity)
    {"group", 1, kUnlimited},       // values per scale
    {"dilation", 1, kUnlimited},    // distance of taps
    {"repeat", 1, 64},              // rounds of a Sinkhorn iteration
    {"text_bytes", 0, kUnlimited},  // bytes of concatenated texts
    {"raw_bytes", 0, kUnlimited},   // bytes of concatenated raw tokens
    {"blocks", 1, kUnlimited},      // blocks of recomputed layers
};
inline constexpr int kSymbolCount = static_cast<int>(std::size(kSymbols));

using Symbol = uint8_t;

// Index into kSymbols. Evaluated at compile time, where an unknown name does not compile.
constexpr Symbol symbol(std::string_view name) {
  for (int i = 0; i < kSymbolCount; ++i) {
    if (kSymbols[i].name == name) return static_cast<Symbol>(i);
  }
  throw "unknown symbol in an operator table";
}

struct ExpressionStep {
  enum Code : uint8_t { variable, constant, add, subtract, multiply, divide };
  Code code;
  uint8_t value;
};

// Postfix program; `optional_axis` marks a dimension that the tensor may leave out ("G?").
template <size_t Steps>
struct BasicExpression {
  std::array<ExpressionStep, Steps> steps{};
  uint8_t count = 0;
  bool optional_axis = false;

  [[nodiscard]] constexpr bool is_symbol() const {
    return count == 1 && steps[0].code == ExpressionStep::variable;
  }
};
using Expression = BasicExpression<9>;
using Formula = BasicExpression<29>;  // counts of operations are longer than dimensions

struct Shape {
  std::array<Expression, 5> dims{};
  uint8_t rank = 0;

  // A first axis T stands for any number of leading dimensions.
  [[nodiscard]] constexpr bool leads_with_tokens() const {
    return rank > 0 && dims[0].is_symbol() && dims[0].steps[0].value == symbol("T");
  }
};

// Values of symbols during one call.
struct SymbolValues {
  std::array<int64_t, kSymbolCount> value{};
  uint32_t bound = 0;

  [[nodiscard]] bool has(Symbol s) const { return (bound >> s & 1U) != 0; }
  void set(Symbol s, int64_t v) {
    value[s] = v;
    bound |= 1U << s;
  }
};
static_assert(kSymbolCount <= 32);

namespace parse {

constexpr bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Recursive descent over "a + b * (c - 1)", without blanks.
template <class Out>
struct ExpressionParser {
  std::string_view text;
  size_t at = 0;
  Out out{};

  constexpr void push(ExpressionStep::Code code, uint8_t value = 0) {
    if (out.count == out.steps.size()) throw "dimension expression too long";
    out.steps[out.count++] = {code, value};
  }
  constexpr void factor() {
    if (at >= text.size()) throw "dimension expression ends early";
    if (text[at] == '(') {
      ++at;
      sum();
      if (at >= text.size() || text[at] != ')') throw "missing )";
      ++at;
    } else if (is_digit(text[at])) {
      int v = 0;
      while (at < text.size() && is_digit(text[at])) v = v * 10 + (text[at++] - '0');
      push(ExpressionStep::constant, static_cast<uint8_t>(v));
    } else {
      const size_t begin = at;
      while (at < text.size() && (is_letter(text[at]) || is_digit(text[at]))) ++at;
      push(ExpressionStep::variable, symbol(text.substr(begin, at - begin)));
    }
  }
  constexpr void product() {
    factor();
    while (at < text.size() && (text[at] == '*' || text[at] == '/')) {
      const bool times = text[at++] == '*';
      factor();
      push(times ? ExpressionStep::multiply : ExpressionStep::divide);
    }
  }
  constexpr void sum() {
    product();
    while (at < text.size() && (text[at] == '+' || text[at] == '-')) {
      const bool plus = text[at++] == '+';
      product();
      push(plus ? ExpressionStep::add : ExpressionStep::subtract);
    }
  }
};

template <class Out = Expression>
constexpr Out expression(std::string_view text) {
  ExpressionParser<Out> p{text};
  p.sum();
  if (p.at < text.size() && text[p.at] == '?') {
    p.out.optional_axis = true;
    ++p.at;
  }
  if (p.at != text.size()) throw "unexpected character in a dimension expression";
  return p.out;
}

// "[T,n,d]"
constexpr Shape shape(std::string_view text) {
  Shape out{};
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') throw "expected [...]";
  text = text.substr(1, text.size() - 2);
  while (!text.empty()) {
    const size_t comma = text.find(',');
    if (out.rank == out.dims.size()) throw "shape has too many dimensions";
    out.dims[out.rank++] = expression(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
  }
  return out;
}

}  // namespace parse
}  // namespace ehc
