#include "ehc/engram/token_map.h"

#include <limits>

#include "core/registry.h"
#include "ehc/text.h"
#include "ops/engram/token_map/token_map_args.h"
#include "text/utf8.h"

namespace ehc::engram {

int32_t token_map_reference(const TokenMapArgs& args);

namespace {

using P = TokenMap;

constexpr auto kTable = table("engram.token_map", "1.1", "compressed id of every token id",
                              in<&P::texts>("texts", "U8[text_bytes]").packed(),
                              in<&P::text_offsets>("text_offsets", "I64[V+1]").packed(),
                              in<&P::raw_tokens>("raw_tokens", "U8[raw_bytes]").packed(),
                              in<&P::raw_offsets>("raw_offsets", "I64[V+1]").packed(),
                              out<&P::table>("table", "I32[V]"), out<&P::size>("size", "I32[1]"));

TokenMapArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const Bound& b = call.bound;
  const auto count = static_cast<size_t>(b["V"]);
  return {.texts = {p.texts.as<uint8_t>(), static_cast<size_t>(b["text_bytes"])},
          .text_offsets = {p.text_offsets.as<int64_t>(), count + 1},
          .raw_tokens = {p.raw_tokens.as<uint8_t>(), static_cast<size_t>(b["raw_bytes"])},
          .raw_offsets = {p.raw_offsets.as<int64_t>(), count + 1},
          .table = {p.table.as<int32_t>(), count}};
}

// Every string lies inside its bytes and is UTF-8, so that nothing is written for a bad vocabulary.
void check_strings(const Schema& schema, const Tensor& bytes, const char* bytes_name,
                   const Tensor& offsets, const char* offsets_name) {
  const auto* offset = offsets.as<const int64_t>();
  const int64_t count = offsets.shape[0] - 1;
  const auto refuse = [&](const std::string& expected, int64_t at) {
    fail_tensor(schema, offsets_name, expected,
                std::to_string(offset[at]) + " at position " + std::to_string(at));
  };
  if (offset[0] != 0) refuse("a first element 0", 0);
  for (int64_t i = 0; i < count; ++i) {
    if (offset[i + 1] < offset[i]) refuse("elements that do not decrease", i + 1);
  }
  if (offset[count] != bytes.shape[0]) {
    refuse(
        "a last element " + std::to_string(bytes.shape[0]) + ", the size of '" + bytes_name + "'",
        count);
  }
  for (int64_t i = 0; i < count; ++i) {
    const std::string_view string(bytes.as<const char>() + offset[i],
                                  static_cast<size_t>(offset[i + 1] - offset[i]));
    const size_t at = text::find_invalid_utf8(string);
    if (at == std::string_view::npos) continue;
    fail_tensor(
        schema, bytes_name, "UTF-8",
        "an invalid sequence at byte " + std::to_string(at) + " of id " + std::to_string(i));
  }
}

void check_vocabulary(const Schema& schema, const Bound& b, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (p.texts.device != Device::cpu) return;
  if (b["V"] > std::numeric_limits<int32_t>::max()) {
    fail_tensor(schema, "table", "at most 2147483647 ids", std::to_string(b["V"]));
  }
  check_strings(schema, p.texts, "texts", p.text_offsets, "text_offsets");
  check_strings(schema, p.raw_tokens, "raw_tokens", p.raw_offsets, "raw_offsets");
}

template <auto Build>
void run(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  p.size.as<int32_t>()[0] = Build(make_args(call));
}

int32_t build(const TokenMapArgs& a) {
  return text::build_token_map(a.texts, a.text_offsets, a.raw_tokens, a.raw_offsets, a.table);
}

constexpr Implementation kImplementations[] = {
    {"cpu", Device::cpu, nullptr, &run<&build>, nullptr},
    {"reference", Device::cpu, nullptr, &run<&token_map_reference>, nullptr},
};

constexpr Operator kTokenMap = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_vocabulary;
  return op;
}();

}  // namespace

void token_map(Context& context, const TokenMap& params) { invoke(kTokenMap, context, params); }
size_t workspace_bytes(const Context& context, const TokenMap& params) {
  return ehc::workspace_bytes(kTokenMap, context, params);
}

std::span<const Operator* const> token_map_operators() {
  static constexpr const Operator* kAll[] = {&kTokenMap};
  return kAll;
}

}  // namespace ehc::engram
