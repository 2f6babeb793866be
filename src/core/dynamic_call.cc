#include "core/dynamic_call.h"

#include <algorithm>
#include <charconv>

#include "core/text.h"

namespace ehc {

namespace {

std::string type_text(const AttributeSpec& a) {
  switch (a.type) {
    case AttributeType::integer:
      return "an integer";
    case AttributeType::real:
      return "a number";
    case AttributeType::boolean:
      return "true or false";
    case AttributeType::choice:
      return "one of " + std::string(a.choices);
    case AttributeType::integers:
      return "integers separated by commas";
  }
  return {};
}

template <class T>
bool parse_number(std::string_view text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace

DynamicCall::DynamicCall(const Operator& op) : op_(op), params_(op.schema.params_size) {
  op_.construct(params_.data());
  for (size_t i = 0; i < schema().attributes.size(); ++i) {
    call_values_[i] = schema().attributes[i].call_default;
  }
  if (schema().lists != 0) tensor_lists_.resize(schema().tensors.size());
}

void DynamicCall::set_list_length(size_t position, size_t length) {
  std::vector<Tensor>& list = tensor_lists_[position];
  list.resize(length);
  schema().tensors[position].access_list(params_.data()) = list;
}

size_t DynamicCall::slots() const { return slot_at(schema().tensors.size()); }

size_t DynamicCall::slot_at(size_t position) const {
  if (tensor_lists_.empty()) return position;
  size_t slot = 0;
  for (size_t i = 0; i < position; ++i) {
    slot += schema().tensors[i].is_list ? tensor_lists_[i].size() : 1;
  }
  return slot;
}

std::pair<size_t, size_t> DynamicCall::place_of(size_t slot) const {
  if (tensor_lists_.empty()) return {slot, 0};
  size_t position = 0;
  while (slot_at(position + 1) <= slot) ++position;
  return {position, slot - slot_at(position)};
}

const TensorSpec& DynamicCall::spec_of(size_t slot) const {
  return schema().tensors[place_of(slot).first];
}

std::string DynamicCall::name_of(size_t slot) const {
  const auto [position, element] = place_of(slot);
  return schema().tensors[position].name_of(element);
}

Tensor& DynamicCall::tensor(size_t slot) const {
  const auto [position, element] = place_of(slot);
  const TensorSpec& spec = schema().tensors[position];
  if (spec.is_list) return const_cast<Tensor&>(tensor_lists_[position][element]);
  return spec.access(const_cast<std::byte*>(params_.data()));
}

void DynamicCall::set_tensor(std::string_view name, const Tensor& t, bool output) {
  const int index = schema().tensor_index(name, output);
  if (index < 0) {
    std::string known;
    for (const TensorSpec& s : schema().tensors) {
      if (s.is_output == output) known += (known.empty() ? "" : " ") + std::string(s.name);
    }
    fail_tensor(
        schema(), name,
        std::string(output ? "outputs" : "inputs") + " named " + (known.empty() ? "none" : known),
        std::string(name));
  }
  const auto position = static_cast<size_t>(index);
  const TensorSpec& spec = schema().tensors[position];
  size_t element = 0;
  if (spec.is_list) {
    if (name == spec.name) {
      fail_tensor(schema(), name, "tensors by their own names, '" + spec.name_of(0) + "' and so on",
                  std::string(name));
    }
    element = static_cast<size_t>(spec.element_of(name));
    if (element >= tensor_lists_[position].size()) set_list_length(position, element + 1);
  }
  tensor(slot_at(position) + element) = t;
}

void DynamicCall::set_input(std::string_view name, const Tensor& t) { set_tensor(name, t, false); }
void DynamicCall::set_output(std::string_view name, const Tensor& t) { set_tensor(name, t, true); }

const AttributeSpec& DynamicCall::spec(std::string_view name, size_t& index) const {
  const int found = schema().attribute_index(name);
  if (found < 0) {
    std::string known;
    for (const AttributeSpec& a : schema().attributes) {
      known += (known.empty() ? "" : " ") + std::string(a.name);
    }
    fail_attribute(schema(), name, "attributes named " + (known.empty() ? "none" : known),
                   std::string(name));
  }
  index = static_cast<size_t>(found);
  return schema().attributes[index];
}

void DynamicCall::store(size_t index, AttributeValue value) {
  value.present = true;
  const AttributeSpec& a = schema().attributes[index];
  if (a.set != nullptr) {
    a.set(params_.data(), value);
  } else {
    call_values_[index] = value;
  }
}

void DynamicCall::set_attribute(std::string_view name, int64_t value) {
  size_t index = 0;
  const AttributeSpec& a = spec(name, index);
  if (a.type == AttributeType::real) {
    store(index, {.real = static_cast<double>(value)});
  } else if (a.type == AttributeType::integer) {
    store(index, {.integer = value});
  } else if (a.type == AttributeType::integers) {
    set_attribute(name, std::vector<int64_t>{value});
  } else {
    fail_attribute(schema(), name, type_text(a), std::to_string(value));
  }
}

void DynamicCall::set_attribute(std::string_view name, double value) {
  size_t index = 0;
  const AttributeSpec& a = spec(name, index);
  if (a.type != AttributeType::real) {
    fail_attribute(schema(), name, type_text(a), number_text(value));
  }
  store(index, {.real = value});
}

void DynamicCall::set_attribute(std::string_view name, bool value) {
  size_t index = 0;
  const AttributeSpec& a = spec(name, index);
  if (a.type != AttributeType::boolean) {
    fail_attribute(schema(), name, type_text(a), value ? "true" : "false");
  }
  store(index, {.integer = value ? 1 : 0});
}

void DynamicCall::set_attribute(std::string_view name, const std::vector<int64_t>& value) {
  size_t index = 0;
  const AttributeSpec& a = spec(name, index);
  if (a.type != AttributeType::integers) {
    fail_attribute(schema(), name, type_text(a), "a list of " + std::to_string(value.size()));
  }
  std::vector<int64_t>& list = integer_lists_.emplace_front(value);
  list.reserve(1);  // an empty list is a value too: its pointer must not be null
  store(index, {.integers = {list.data(), value.size()}});
}

void DynamicCall::set_choice(std::string_view name, int64_t position) {
  size_t index = 0;
  const AttributeSpec& a = spec(name, index);
  const auto slashes = std::count(a.choices.begin(), a.choices.end(), '/');
  if (a.type != AttributeType::choice || position < 0 || position > slashes) {
    fail_attribute(schema(), name, type_text(a), "position " + std::to_string(position));
  }
  store(index, {.integer = position});
}

void DynamicCall::set_attribute_text(std::string_view name, std::string_view text) {
  size_t index = 0;
  const AttributeSpec& a = spec(name, index);
  const auto malformed = [&] {
    fail_attribute(schema(), name, type_text(a), "'" + std::string(text) + "'");
  };
  AttributeValue value;
  switch (a.type) {
    case AttributeType::integer:
      if (!parse_number(text, value.integer)) malformed();
      break;
    case AttributeType::real:
      if (!parse_number(text, value.real)) malformed();
      break;
    case AttributeType::boolean:
      if (text != "true" && text != "false") malformed();
      value.integer = text == "true" ? 1 : 0;
      break;
    case AttributeType::choice:
      value.integer = choice_index(a.choices, text);
      if (value.integer < 0) malformed();
      break;
    case AttributeType::integers: {
      std::vector<int64_t> list;
      std::string_view rest = text;
      while (!text.empty()) {
        const size_t comma = rest.find(',');
        int64_t item = 0;
        if (!parse_number(rest.substr(0, comma), item)) malformed();
        list.push_back(item);
        if (comma == std::string_view::npos) break;
        rest = rest.substr(comma + 1);
      }
      set_attribute(name, list);
      return;
    }
  }
  store(index, value);
}

// Backward reads the input that an in-place call overwrites. Views cannot tell: there may be none
// (T = 0, an absent output), so the flags are asked.
void DynamicCall::check_flags() const {
  const auto set = [&](std::string_view name) {
    const int index = schema().attribute_index(name);
    return index >= 0 && call_values_[static_cast<size_t>(index)].integer != 0;
  };
  if (set("inplace") && set("save")) {
    fail_attribute(schema(), "inplace", "false when 'save' is true", "true");
  }
}

template <class Body>
void DynamicCall::with_bound_inputs(const Body& body) const {
  check_flags();
  const Arguments args{params_.data(), call_values_.data(), nullptr};
  FrontDoor door(schema(), args);
  door.bind_inputs(op_.derive);
  body(door);
}

std::vector<Tensor> DynamicCall::output_types() const {
  std::vector<Tensor> made(schema().tensors.size());
  with_bound_inputs([&](const FrontDoor& door) {
    for (size_t i = 0; i < made.size(); ++i) {
      if (schema().tensors[i].is_output) made[i] = door.infer_output(i);
    }
  });
  return made;
}

std::vector<Tensor> DynamicCall::outputs() {
  std::vector<Tensor> made;
  with_bound_inputs([&](const FrontDoor& door) {
    for (size_t i = 0; i < schema().tensors.size(); ++i) {
      const TensorSpec& spec = schema().tensors[i];
      if (spec.is_list && spec.is_output) {
        set_list_length(i, static_cast<size_t>(door.list_length(i)));
      }
      made.resize(slot_at(i + 1), spec.is_output ? door.infer_output(i) : Tensor());
    }
  });
  return made;
}

int64_t DynamicCall::flops() const {
  int64_t count = 0;
  with_bound_inputs([&](const FrontDoor& door) { count = door.flops(); });
  return count;
}

std::vector<std::pair<size_t, size_t>> DynamicCall::shared_memory() const {
  std::vector<std::pair<size_t, size_t>> pairs;
  const int flag = schema().attribute_index("inplace");
  if (flag < 0 || call_values_[static_cast<size_t>(flag)].integer == 0) return pairs;
  for (size_t i = 0; i < schema().tensors.size(); ++i) {
    const TensorSpec& s = schema().tensors[i];
    if (s.is_output && s.alias_index >= 0) {
      pairs.emplace_back(slot_at(i), slot_at(static_cast<size_t>(s.alias_index)));
    }
  }
  return pairs;
}

void DynamicCall::check(Device device, int device_index) {
  check_flags();
  ParameterStorage flattened(schema().params_size);
  check_call(op_, arguments(flattened), device, device_index);
}

void DynamicCall::run(Context& context) {
  check_flags();
  ParameterStorage flattened(schema().params_size);
  invoke(op_, context, arguments(flattened));
}

Plan DynamicCall::plan(const Context& context) {
  check_flags();
  ParameterStorage flattened(schema().params_size);
  return ehc::plan(op_, context, arguments(flattened));
}

}  // namespace ehc
