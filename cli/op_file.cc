#include "cli/op_file.h"

#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/integers.h"
#include "core/tensor_bytes.h"
#include "core/text.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

using nlohmann::json;

constexpr std::string_view kExpected = "expected.";

// Keys of all objects that are open, outermost first: one that comes twice would hide a value.
class DuplicateKeys {
 public:
  bool operator()(int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open_.emplace_back();
    if (event == json::parse_event_t::object_end) open_.pop_back();
    if (event == json::parse_event_t::key && !found_) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_.back().insert(key).second) found_ = key;
    }
    return true;
  }
  [[nodiscard]] const std::optional<std::string>& found() const { return found_; }

 private:
  std::vector<std::set<std::string>> open_;
  std::optional<std::string> found_;
};

json parse_metadata(const Schema& schema, const std::optional<std::string>& text) {
  if (!text) return json::object();
  DuplicateKeys keys;
  json parsed = json::parse(*text, std::ref(keys), false);
  if (!parsed.is_object()) {
    fail(schema, "metadata 'ehc': expected a JSON object, got '" + text->substr(0, 60) + "'");
  }
  if (keys.found()) {
    fail(schema,
         "metadata 'ehc': expected every key once, got " + in_quotes(*keys.found()) + " twice");
  }
  return parsed;
}

// A JSON integer that fits 64 signed bits.
bool is_int64(const json& value) {
  return value.is_number_integer() &&
         !(value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX});
}

// For an error text. Nested values are only named: dump() recurses as deep as they are.
std::string shown(const json& value) {
  return value.is_structured() ? (value.is_array() ? "an array" : "an object") : value.dump();
}

void set_from_json(DynamicCall& call, const std::string& name, const json& value) {
  if (value.is_boolean()) {
    call.set_attribute(name, value.get<bool>());
  } else if (is_int64(value)) {
    call.set_attribute(name, value.get<int64_t>());
  } else if (value.is_number_float()) {
    call.set_attribute(name, value.get<double>());
  } else if (value.is_string()) {
    call.set_attribute_text(name, value.get<std::string>());
  } else if (value.is_array()) {
    std::vector<int64_t> list;
    for (const json& item : value) {
      if (!is_int64(item)) {
        fail_attribute(call.schema(), name, "an array of 64-bit integers", shown(item) + " in it");
      }
      list.push_back(item.get<int64_t>());
    }
    call.set_attribute(name, list);
  } else {
    fail_attribute(call.schema(), name, "a 64-bit integer, number, boolean, string or array",
                   shown(value));
  }
}

// {output: [ulp, abs] or [ulp, abs, share]}
std::map<std::string, Tolerance> read_tolerances(const Schema& schema, const json& rules) {
  std::map<std::string, Tolerance> out;
  if (!rules.is_object()) {
    fail(schema, "metadata 'tolerance': expected an object, got " + shown(rules));
  }
  for (const auto& [name, rule] : rules.items()) {
    if (schema.tensor_index(name, true) < 0) {
      fail(schema, "metadata 'tolerance': expected names of outputs, got " + in_quotes(name));
    }
    bool numbers = rule.is_array() && (rule.size() == 2 || rule.size() == 3);
    for (size_t i = 0; numbers && i < rule.size(); ++i) {
      numbers = rule[i].is_number() && rule[i].get<double>() >= 0;
    }
    if (!numbers) {
      fail(schema, "metadata 'tolerance': '" + name +
                       "': expected [ulp, abs] or [ulp, abs, share] of numbers >= 0, got " +
                       shown(rule));
    }
    out[name] = {rule[0].get<double>(), rule[1].get<double>(),
                 rule.size() == 3 ? rule[2].get<double>() : 1.0};
  }
  return out;
}

}  // namespace

OpFile read_op_file(const tables::SafetensorsFile& file) {
  OpFile out;
  for (const auto& [name, tensor] : file.tensors()) {
    if (name.starts_with(kExpected)) {
      out.expected[name.substr(kExpected.size())] = tensor;
    } else {
      out.inputs[name] = tensor;
    }
  }
  const auto found = file.metadata().find("ehc");
  if (found != file.metadata().end()) out.metadata = found->second;
  return out;
}

std::map<std::string, Tolerance> bind_op_file(DynamicCall& call, const OpFile& file,
                                              const Settings& settings) {
  const Schema& schema = call.schema();
  const json metadata = parse_metadata(schema, file.metadata);
  std::map<std::string, Tolerance> tolerances;
  for (const auto& [key, value] : metadata.items()) {
    if (key == "op") {
      if (!value.is_string() || value.get<std::string>() != schema.name) {
        fail(schema,
             "metadata 'op': expected '" + std::string(schema.name) + "', got " + shown(value));
      }
    } else if (key == "set") {
      if (!value.is_object())
        fail(schema, "metadata 'set': expected an object, got " + shown(value));
      for (const auto& [name, item] : value.items()) set_from_json(call, name, item);
    } else if (key == "tolerance") {
      tolerances = read_tolerances(schema, value);
    } else {
      fail(schema, "metadata 'ehc': expected keys op, set, tolerance, got '" + key + "'");
    }
  }
  for (const auto& [name, tensor] : file.inputs) call.set_input(name, tensor);
  for (const auto& [name, text] : settings) call.set_attribute_text(name, text);
  return tolerances;
}

namespace {

// A fresh output holds a pattern, so that an element that is never written shows.
Buffer poisoned(const Context& context, size_t bytes) {
  Buffer buffer(context, bytes);
  const std::vector<unsigned char> pattern(bytes, 0xcd);
  buffer.upload(pattern.data());
  return buffer;
}

}  // namespace

OpResult run_call(DynamicCall& call, Device device, const std::string& implementation,
                  int threads) {
  const Context host = Context::cpu(1);
  const std::vector<Tensor> made = call.outputs();
  OpResult result;
  const auto shared = call.shared_memory();

  // Outputs in host memory; with `inplace`, the input moves into the output's memory.
  for (size_t i = 0; i < made.size(); ++i) {
    Tensor& t = call.tensor(i);
    const TensorSpec& spec = call.spec_of(i);
    if (!spec.is_output) continue;
    t = made[i];
    if (!t.present()) continue;
    result.memory.push_back(poisoned(host, bytes_of(t)));
    t.data = result.memory.back().data();
    for (const auto& [out, in] : shared) {
      if (out != i) continue;
      Tensor& source = call.tensor(in);
      if (bytes_of(source) > 0) std::memcpy(t.data, source.data, bytes_of(source));
      source = t;
    }
    result.outputs.push_back({i, call.name_of(i), t, spec.name.ends_with("_partial")});
  }
  call.check(Device::cpu, 0);

  Context context = device == Device::cpu ? Context::cpu(threads) : Context::cuda(0, nullptr);
  context.set_implementation(implementation);
  std::vector<Buffer> on_device;
  if (device == Device::cuda) {
    for (size_t i = 0; i < call.slots(); ++i) {
      Tensor& t = call.tensor(i);
      if (!t.present()) continue;
      const void* home = t.data;
      t.device = Device::cuda;
      bool done = false;
      for (const auto& [out, in] : shared) {
        if (out == i) {
          t.data = call.tensor(in).data;
          done = true;
        }
      }
      if (done) continue;
      on_device.emplace_back(context, bytes_of(t));
      on_device.back().upload(home);
      t.data = on_device.back().data();
    }
  }
  const Buffer workspace(context, call.plan(context).workspace_bytes);
  context.set_workspace(workspace.data(), workspace.bytes());
  call.run(context);
  synchronize(context);
  if (device == Device::cuda) {
    for (OpResult::Output& output : result.outputs) {
      const Tensor& t = call.tensor(output.slot);
      for (const Buffer& buffer : on_device) {
        if (buffer.data() == t.data) buffer.download(output.tensor.data);
      }
    }
  }
  int64_t unique_rows = 0;
  for (OpResult::Output& output : result.outputs) {
    cut_to_unique_rows(call.spec_of(output.slot), output.tensor, unique_rows);
  }
  return result;
}

}  // namespace ehc::cli
