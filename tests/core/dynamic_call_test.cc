// Calls by name: what `ehc op`, the C ABI and the cases go through.
#include "core/dynamic_call.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "ehc/error.h"
#include "tests/core/toy_operator.h"

namespace ehc {
namespace {

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::contract);
    return e.what();
  }
  return "accepted";
}

class ByName : public testing::Test {
 protected:
  DynamicCall call{toy::kOperator};
  std::vector<float> x = std::vector<float>(24, 3.0F);
  std::vector<float> both = std::vector<float>(36);

  void set_required() {
    call.set_input("x", {x.data(), DType::f32, {3, 2, 4}});
    call.set_input("both", {both.data(), DType::f32, {3, 3, 4}});
    call.set_attribute("eps", 1e-6);
  }
  AttributeValue value(std::string_view name) {
    return call.attribute(static_cast<size_t>(call.schema().attribute_index(name)));
  }
};

TEST_F(ByName, UnknownNames) {
  EXPECT_EQ(message_of([&] { call.set_input("y", {}); }),
            "toy: tensor 'y': expected inputs named x both left right table first second state, "
            "got y");
  EXPECT_EQ(message_of([&] { call.set_output("x", {}); }),
            "toy: tensor 'x': expected outputs named out norm rows state, got x");
  EXPECT_EQ(message_of([&] { call.set_attribute("epsilon", 1.0); }),
            "toy: attribute 'epsilon': expected attributes named eps rate count mode sizes "
            "dilation save inplace index_dtype, got epsilon");
}

TEST_F(ByName, TextIsParsedByTheAttributesType) {
  call.set_attribute_text("eps", "1e-6");
  EXPECT_EQ(value("eps").real, 1e-6);
  call.set_attribute_text("count", "7");
  EXPECT_EQ(value("count").integer, 7);
  call.set_attribute_text("mode", "copy");
  EXPECT_EQ(value("mode").integer, 1);
  call.set_attribute_text("save", "true");
  EXPECT_EQ(value("save").integer, 1);
  call.set_attribute_text("sizes", "1,14,3");
  EXPECT_EQ(std::vector<int64_t>(value("sizes").integers.begin(), value("sizes").integers.end()),
            (std::vector<int64_t>{1, 14, 3}));
  call.set_attribute_text("sizes", "");
  EXPECT_TRUE(value("sizes").present);
  EXPECT_TRUE(value("sizes").integers.empty());
}

TEST_F(ByName, MalformedText) {
  const std::pair<const char*, const char*> cases[] = {
      {"eps", "x"},     {"eps", ""},          {"eps", "1e-6 "},
      {"count", "1.5"}, {"count", "0x1"},     {"count", ""},
      {"save", "1"},    {"save", "True"},     {"mode", "subtract"},
      {"mode", ""},     {"mode", "add/copy"}, {"sizes", "1,,2"},
      {"sizes", "1,"},  {"sizes", "a"},       {"count", "99999999999999999999"},
  };
  for (const auto& [name, text] : cases) {
    EXPECT_NE(message_of([&, n = name, t = text] {
                call.set_attribute_text(n, t);
              }).find(std::string("toy: attribute '") + name + "': expected "),
              std::string::npos)
        << name << "=" << text;
  }
}

TEST_F(ByName, TypesOfValues) {
  EXPECT_EQ(message_of([&] { call.set_attribute("eps", int64_t{1}); }), "accepted")
      << "an integer is a number";
  EXPECT_EQ(message_of([&] { call.set_attribute("sizes", int64_t{4}); }), "accepted");
  EXPECT_EQ(message_of([&] { call.set_attribute("count", 1.5); }),
            "toy: attribute 'count': expected an integer, got 1.5");
  EXPECT_EQ(message_of([&] { call.set_attribute("count", true); }),
            "toy: attribute 'count': expected an integer, got true");
  EXPECT_EQ(message_of([&] { call.set_attribute("save", int64_t{1}); }),
            "toy: attribute 'save': expected true or false, got 1");
  EXPECT_EQ(message_of([&] { call.set_attribute("mode", std::vector<int64_t>{1}); }),
            "toy: attribute 'mode': expected one of add/copy, got a list of 1");
}

TEST_F(ByName, InfersOutputs) {
  set_required();
  std::vector<Tensor> made = call.outputs();
  const auto at = [&](const char* name) {
    return describe(made[static_cast<size_t>(call.schema().tensor_index(name, true))]);
  };
  EXPECT_EQ(at("out"), "F32[3,2,4]");
  EXPECT_EQ(at("norm"), "none");
  EXPECT_EQ(at("rows"), "none");
  call.set_attribute("save", true);
  const std::vector<int32_t> table(4);
  call.set_input("table", {table.data(), DType::i32, {2, 2}});
  call.set_attribute("rate", 0.5);
  call.set_attribute_text("index_dtype", "I64");
  made = call.outputs();
  EXPECT_EQ(at("norm"), "F32[3,2]");
  EXPECT_EQ(at("rows"), "I64[3]");
}

TEST_F(ByName, InfersOutputsWithLeadingDimensions) {
  call.set_input("x", {x.data(), DType::f32, {3, 1, 2, 4}});
  call.set_input("both", {both.data(), DType::f32, {3, 1, 3, 4}});
  call.set_attribute("eps", 1e-6);
  const size_t out = static_cast<size_t>(call.schema().tensor_index("out", true));
  EXPECT_EQ(describe(call.outputs()[out]), "F32[3,1,2,4]");
}

TEST_F(ByName, InPlaceSharesTheAliasedInput) {
  set_required();
  EXPECT_TRUE(call.shared_memory().empty());
  call.set_attribute("inplace", true);
  const auto pairs = call.shared_memory();
  const auto x_index = static_cast<size_t>(call.schema().tensor_index("x", false));
  const auto out_index = static_cast<size_t>(call.schema().tensor_index("out", true));
  ASSERT_FALSE(pairs.empty());
  EXPECT_EQ(pairs[0].first, out_index);
  EXPECT_EQ(pairs[0].second, x_index);
}

TEST_F(ByName, InPlaceExcludesSaving) {
  set_required();
  call.set_attribute("inplace", true);
  call.set_attribute("save", true);
  const std::string refused =
      "toy: attribute 'inplace': expected false when 'save' is true, got true";
  EXPECT_EQ(message_of([&] { call.outputs(); }), refused);
  EXPECT_EQ(message_of([&] { call.check(Device::cpu, 0); }), refused);
}

TEST_F(ByName, RunsAndLeavesTheCallAsItWas) {
  set_required();
  std::vector<float> out(24);
  call.set_output("out", {out.data(), DType::f32, {3, 2, 4}});
  Context context = Context::cpu(1);
  call.check(Device::cpu, 0);
  call.run(context);
  EXPECT_EQ(out, std::vector<float>(24, 6.0F));
  out.assign(24, 0);
  call.run(context);
  EXPECT_EQ(out, std::vector<float>(24, 6.0F)) << "a call can run again";
}

}  // namespace
}  // namespace ehc
