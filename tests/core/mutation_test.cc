// Every single fault in the inputs of every golden file: refused with a message that names what is
// wrong, or legal by the operator's table.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/op_file.h"
#include "core/registry.h"
#include "ehc/error.h"

namespace ehc::cli {
namespace {

// A golden call with spare memory behind every input, so that a mutated shape can be read.
class GoldenCall {
 public:
  explicit GoldenCall(const std::string& path)
      : file_(tables::SafetensorsFile::open(path)), parts_(read_op_file(file_)) {
    const std::string name = std::filesystem::path(path).filename();
    op_ = find_operator(name.substr(0, name.rfind('.', name.rfind('.') - 1)));
    for (auto& [input, tensor] : parts_.inputs) {
      const size_t bytes = static_cast<size_t>(tensor.numel()) * size_of(tensor.dtype);
      std::vector<char>& memory = memory_.emplace_back(64 * bytes + 4096);
      std::copy_n(tensor.as<char>(), bytes, memory.data());
      tensor.data = memory.data();
    }
  }
  [[nodiscard]] const Operator& op() const { return *op_; }
  [[nodiscard]] const OpFile& parts() const { return parts_; }
  [[nodiscard]] bool sets(std::string_view attribute) const {
    const auto set = nlohmann::json::parse(parts_.metadata.value_or("{}"));
    return set.contains("set") && set["set"].contains(std::string(attribute));
  }

  // The front door's answer to the call with input `name` replaced (absent: dropped); empty when
  // it is accepted.
  [[nodiscard]] std::string answer(const std::string& name, const Tensor& replacement) const {
    OpFile mutated = parts_;
    mutated.inputs.erase(name);
    if (replacement.present()) mutated.inputs[name] = replacement;
    DynamicCall call(*op_);
    std::vector<std::vector<char>> outputs;
    try {
      bind_op_file(call, mutated, {});
      const std::vector<Tensor> made = call.outputs();
      for (size_t i = 0; i < made.size(); ++i) {
        if (!made[i].present()) continue;
        outputs.emplace_back(static_cast<size_t>(made[i].numel()) * size_of(made[i].dtype) + 64);
        call.tensor(i) = made[i];
        const auto address = reinterpret_cast<uintptr_t>(outputs.back().data());
        call.tensor(i).data = outputs.back().data() + (64 - address % 64) % 64;
      }
      for (const auto& [output, input] : call.shared_memory()) {
        call.tensor(output) = call.tensor(input);
      }
      call.check(Device::cpu, 0);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::contract) << e.what();
      return e.what();
    }
    return {};
  }

 private:
  tables::SafetensorsFile file_;
  OpFile parts_;
  const Operator* op_ = nullptr;
  std::vector<std::vector<char>> memory_;
};

uint32_t symbols_of(const Expression& e) {
  uint32_t set = 0;
  for (uint8_t i = 0; i < e.count; ++i) {
    if (e.steps[i].code == ExpressionStep::variable) set |= 1U << e.steps[i].value;
  }
  return set;
}

// What the table says about a mutated call, found without the code that is tested.
struct Law {
  const GoldenCall& call;
  const Schema& schema = call.op().schema;

  [[nodiscard]] bool present(size_t i, const std::string& dropped) const {
    const TensorSpec& s = schema.tensors[i];
    if (s.is_output) return false;
    const auto& inputs = call.parts().inputs;
    return std::any_of(inputs.begin(), inputs.end(), [&](const auto& input) {
      return input.first != dropped &&
             schema.tensor_index(input.first, false) == static_cast<int>(i);
    });
  }

  [[nodiscard]] bool may_drop(const std::string& name) const {
    const auto index = static_cast<size_t>(schema.tensor_index(name, false));
    const TensorSpec& s = schema.tensors[index];
    // The last tensor of a list may go where the operator's rules allow it, no other.
    if (s.is_list) return call.parts().inputs.count(s.name_of(s.element_of(name) + 1)) == 0;
    if (!s.is_optional) return false;
    for (const GroupSpec& g : schema.groups) {
      const auto lists = {std::pair{g.first, g.first_count}, std::pair{g.second, g.second_count}};
      for (const auto& [list, count] : lists) {
        if (std::find(list.begin(), list.begin() + count, index) == list.begin() + count) continue;
        if (g.kind == GroupSpec::one_of || count > 1) return false;
      }
    }
    return true;
  }

  // Calls visit(tensor, dimension, symbols) for the dimensions of all inputs that are there.
  template <class Visit>
  void each_dimension(const Visit& visit) const {
    for (size_t i = 0; i < schema.tensors.size(); ++i) {
      if (!present(i, {})) continue;
      const Shape& shape = schema.tensors[i].shape;
      for (int k = 0; k < shape.rank; ++k) {
        visit(i, k, symbols_of(shape.dims[static_cast<size_t>(k)]));
      }
    }
  }

  // Symbols that an attribute of this call fixes.
  [[nodiscard]] uint32_t fixed() const {
    uint32_t symbols = 0;
    for (const AttributeSpec& a : schema.attributes) {
      if (call.sets(a.name)) symbols |= symbols_of(a.binds);
    }
    return symbols;
  }

  // Symbols that stand in this one dimension alone: its other factors may change, as long as they
  // divide it.
  [[nodiscard]] bool has_free_factor(size_t tensor, int dim) const {
    const uint32_t mine = symbols_of(schema.tensors[tensor].shape.dims[static_cast<size_t>(dim)]);
    uint32_t others = fixed();
    each_dimension([&](size_t i, int k, uint32_t symbols) {
      if (i != tensor || k != dim) others |= symbols;
    });
    return (mine & (mine - 1)) != 0 && (mine & ~others) != 0;
  }

  // Symbols that a dimension shares with another input, an attribute or a relation.
  [[nodiscard]] bool is_tied(size_t tensor, int dim) const {
    const auto mine = symbols_of(schema.tensors[tensor].shape.dims[static_cast<size_t>(dim)]);
    uint32_t others = fixed();
    each_dimension([&](size_t i, int k, uint32_t symbols) {
      if ((i != tensor || k != dim) && !has_free_factor(i, k)) others |= symbols;
    });
    for (const SymbolDefault& s : schema.defaults) {
      if (!present(s.tensor_index, {})) others |= 1U << s.index;
    }
    const auto relate = [&](std::string_view result, std::string_view formula) {
      const uint32_t parts = symbols_of(parse::expression(formula));
      const uint32_t whole = 1U << symbol(result);
      const uint32_t all = parts | whole;
      if ((schema.symbols & all) == all && (mine & all) != 0 && ((others & all) & ~mine) != 0) {
        others |= mine;
      }
    };
    relate("K", "n*d");
    relate("N", "n*n+2*n");
    relate("C", "(Nmax-1)*Kh");
    return (mine & ~others) == 0;
  }

  [[nodiscard]] bool only_one_leads(size_t tensor) const {
    if (!schema.flattens || !schema.tensors[tensor].shape.leads_with_tokens()) return false;
    for (size_t i = 0; i < schema.tensors.size(); ++i) {
      if (i != tensor && present(i, {}) && schema.tensors[i].shape.leads_with_tokens()) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] bool may_have_type(size_t tensor, DType type) const {
    const TensorSpec& spec = schema.tensors[tensor];
    if (!contains(spec.dtypes, type)) return false;
    if (spec.dtype_rule != DTypeRule::activation) return true;
    for (size_t i = 0; i < schema.tensors.size(); ++i) {
      const bool other = i != tensor && present(i, {});
      if (other && schema.tensors[i].dtype_rule == DTypeRule::activation) return false;
    }
    return true;
  }
};

std::vector<std::string> golden_paths() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(EHC_SOURCE_DIR "/tests/golden")) {
    const std::string name = entry.path().filename();
    if (entry.path().extension() != ".safetensors") continue;
    if (find_operator(name.substr(0, name.rfind('.', name.rfind('.') - 1))) != nullptr) {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

TEST(Mutation, EveryFaultIsRefusedOrLegal) {
  int faults = 0;
  int refused = 0;
  for (const std::string& path : golden_paths()) {
    SCOPED_TRACE(path);
    const GoldenCall call(path);
    const Law law{call};
    const auto expect = [&](const std::string& what, const std::string& name, const Tensor& mutated,
                            bool legal) {
      const std::string text = call.answer(name, mutated);
      ++faults;
      if (text.empty()) {
        EXPECT_TRUE(legal) << name << ": " << what << " was accepted";
        return;
      }
      ++refused;
      const std::string prefix = std::string(call.op().schema.name) + ": ";
      EXPECT_EQ(text.rfind(prefix, 0), 0U) << text;
      // It names a tensor or attribute of the operator.
      bool named = false;
      for (const TensorSpec& s : call.op().schema.tensors) {
        named = named ||
                text.find("'" + std::string(s.is_list ? s.stem() : s.name)) != std::string::npos;
      }
      for (const AttributeSpec& a : call.op().schema.attributes) {
        named = named || text.find("'" + std::string(a.name) + "'") != std::string::npos;
      }
      EXPECT_TRUE(named) << name << ": " << what << ": " << text;
      EXPECT_NE(text.find(": expected "), std::string::npos) << text;
      EXPECT_NE(text.find(", got "), std::string::npos) << text;
    };
    for (const auto& [name, original] : call.parts().inputs) {
      ASSERT_EQ(call.answer(name, original), "");
      const auto index = static_cast<size_t>(call.op().schema.tensor_index(name, false));
      expect("dropped", name, {}, law.may_drop(name));
      for (int type = 1; type < kDTypeCount; ++type) {
        Tensor t = original;
        t.dtype = static_cast<DType>(type);
        if (t.dtype == original.dtype) continue;
        expect("dtype " + std::string(name_of(t.dtype)), name, t,
               law.may_have_type(index, t.dtype));
      }
      const TensorSpec& spec = call.op().schema.tensors[index];
      const int lead = original.rank - spec.shape.rank;
      for (int k = 0; k < original.rank; ++k) {
        int64_t shape[kMaxRank];
        std::copy_n(original.shape, original.rank, shape);
        ++shape[k];
        const int dim = std::max(0, k - lead);
        const bool optional_axis = lead < 0;
        expect("dimension " + std::to_string(k) + " + 1", name,
               Tensor(original.data, original.dtype, shape, original.rank),
               optional_axis || !law.is_tied(index, dim));
      }
      int64_t longer[kMaxRank] = {1};
      std::copy_n(original.shape, original.rank, longer + 1);
      expect("rank + 1", name, Tensor(original.data, original.dtype, longer, original.rank + 1),
             law.only_one_leads(index));
      if (original.rank == 0) continue;
      expect("rank - 1", name,
             Tensor(original.data, original.dtype, original.shape + 1, original.rank - 1),
             lead > 0 && law.only_one_leads(index));
    }
  }
  EXPECT_GT(faults, 300);
  EXPECT_GT(refused, faults / 2);
}

// The same faults by hand, so that the law above is not the only judge.
TEST(Mutation, MessagesOfHash) {
  const GoldenCall call(EHC_SOURCE_DIR "/tests/golden/engram.hash.0.safetensors");
  const Tensor window = call.parts().inputs.at("window");
  const Tensor sizes = call.parts().inputs.at("vocab_sizes");
  EXPECT_EQ(call.answer("window", {}),
            "engram.hash: tensor 'window': expected I32[T,Nmax], got none");
  Tensor wrong = window;
  wrong.dtype = DType::i64;
  EXPECT_EQ(call.answer("window", wrong).rfind("engram.hash: tensor 'window': expected I32[", 0),
            0U);
  const int64_t shape[] = {sizes.shape[0], sizes.shape[1], sizes.shape[2] + 1};
  const std::string text = call.answer("vocab_sizes", Tensor(sizes.data, sizes.dtype, shape, 3));
  EXPECT_EQ(text.rfind("engram.hash: tensor 'offsets': expected I", 0), 0U) << text;
}

}  // namespace
}  // namespace ehc::cli
