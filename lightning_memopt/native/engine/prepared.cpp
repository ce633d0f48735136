#include "prepared.h"

#include <ATen/ScalarOps.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "view.h"

namespace memopt {
namespace {

using c10::IValue;
using c10::TypeKind;

std::optional<int64_t> integer(PyObject* value) {
  if (PyBool_Check(value) || !PyLong_Check(value)) return std::nullopt;
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow ? std::nullopt : std::optional(number);
}

// A number for an argument of any numeric type. A bool is not accepted for an integral argument.
std::optional<IValue> number(PyObject* value, TypeKind kind) {
  if (kind == TypeKind::BoolType) return PyBool_Check(value) ? std::optional<IValue>(value == Py_True) : std::nullopt;
  if (kind == TypeKind::NumberType && PyBool_Check(value)) return IValue(value == Py_True);
  if (kind != TypeKind::IntType && PyFloat_Check(value)) return IValue(PyFloat_AS_DOUBLE(value));
  const auto whole = integer(value);
  if (!whole) return std::nullopt;
  if (kind == TypeKind::FloatType) return IValue(static_cast<double>(*whole));
  return IValue(*whole);
}

template <typename T>
std::optional<IValue> numbers(PyObject* list, TypeKind kind, T (*read)(const IValue&)) {
  c10::List<T> made;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); ++i) {
    const auto each = number(PySequence_Fast_GET_ITEM(list, i), kind);
    if (!each) return std::nullopt;
    made.push_back(read(*each));
  }
  return IValue(std::move(made));
}

bool is_generator(const c10::Type& type) {
  return type.kind() == TypeKind::OptionalType
      ? is_generator(*type.expectRef<c10::OptionalType>().getElementType())
      : type.kind() == TypeKind::GeneratorType;
}

// Arguments while they are read.
class Reader {
 public:
  Reader(Prepared* to, const c10::FunctionSchema& schema) : to_(to), schema_(schema) {}

  bool read(size_t at, PyObject* value) {
    if (value == Py_Ellipsis) {
      to_->ignored.push_back(at);
      return true;
    }
    const auto& argument = schema_.arguments()[at];
    c10::TypePtr type = argument.type();
    if (type->kind() == TypeKind::OptionalType) {
      if (value == Py_None) return put(at, IValue());
      type = type->expectRef<c10::OptionalType>().getElementType();
    }
    switch (type->kind()) {
      case TypeKind::TensorType:
        if (value == Py_None) return put(at, IValue());
        if (PyFloat_Check(value) || PyLong_Check(value)) return number_for_tensor(at, value);
        return tensor(at, -1, value) && put(at, IValue(at::Tensor()));
      case TypeKind::ListType:
        return (PyList_Check(value) || PyTuple_Check(value)) && put(at, list(at, value, *type->expectRef<c10::ListType>().getElementType()));
      case TypeKind::StringType:
        return PyUnicode_Check(value) && put(at, IValue(std::string(PyUnicode_AsUTF8(value))));
      case TypeKind::DeviceObjType:
        return THPDevice_Check(value) && put(at, IValue(reinterpret_cast<THPDevice*>(value)->device));
      case TypeKind::IntType:
        if (THPDtype_Check(value)) return put(at, IValue(static_cast<int64_t>(reinterpret_cast<THPDtype*>(value)->scalar_type)));
        if (THPLayout_Check(value)) return put(at, IValue(static_cast<int64_t>(reinterpret_cast<THPLayout*>(value)->layout)));
        if (THPMemoryFormat_Check(value))
          return put(at, IValue(static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(value)->memory_format)));
        return put(at, number(value, TypeKind::IntType));
      case TypeKind::BoolType:
      case TypeKind::FloatType:
      case TypeKind::NumberType:
        return put(at, number(value, type->kind()));
      default:
        return false;
    }
  }

 private:
  bool put(size_t at, std::optional<IValue> value) {
    if (!value) return false;
    to_->stack[at] = std::move(*value);
    return true;
  }

  bool number_for_tensor(size_t at, PyObject* value) {
    const auto read = number(value, TypeKind::NumberType);
    if (read) to_->numbers.push_back({at, read->toScalar()});
    return read.has_value();
  }

  bool tensor(size_t at, int64_t element, PyObject* value) {
    const View* const view = value_in<View>(value);
    if (view == nullptr || view->conj || view->neg) return false;
    to_->inputs.push_back({at, element, view->window});
    return true;
  }

  std::optional<IValue> list(size_t at, PyObject* values, const c10::Type& of) {
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(values);
    if (of.kind() == TypeKind::IntType || of.kind() == TypeKind::SymIntType)
      return numbers<int64_t>(values, TypeKind::IntType, [](const IValue& v) { return v.toInt(); });
    if (of.kind() == TypeKind::FloatType)
      return numbers<double>(values, TypeKind::FloatType, [](const IValue& v) { return v.toDouble(); });
    if (of.kind() == TypeKind::BoolType)
      return numbers<bool>(values, TypeKind::BoolType, [](const IValue& v) { return v.toBool(); });
    if (of.kind() == TypeKind::NumberType)
      return numbers<at::Scalar>(values, TypeKind::NumberType, [](const IValue& v) { return v.toScalar(); });
    const bool optional = of.kind() == TypeKind::OptionalType;
    if (!optional && of.kind() != TypeKind::TensorType) return std::nullopt;
    if (optional && of.expectRef<c10::OptionalType>().getElementType()->kind() != TypeKind::TensorType) return std::nullopt;
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* const value = PySequence_Fast_GET_ITEM(values, i);
      if (!(optional && value == Py_None) && !tensor(at, i, value)) return std::nullopt;
    }
    if (optional) return IValue(c10::List<std::optional<at::Tensor>>(std::vector<std::optional<at::Tensor>>(n)));
    return IValue(c10::List<at::Tensor>(std::vector<at::Tensor>(n)));
  }

  Prepared* to_;
  const c10::FunctionSchema& schema_;
};

}  // namespace

Window window_on(const at::Tensor& t) {
  return {/*version=*/-1, c10::DimVector(t.sizes()), c10::DimVector(t.strides()), t.storage_offset(), t.dtype()};
}

bool Prepared::is_ignored(size_t argument) const {
  return std::find(ignored.begin(), ignored.end(), argument) != ignored.end();
}

const Number* Prepared::number_at(size_t argument) const {
  for (const Number& number : numbers)
    if (number.argument == argument) return &number;
  return nullptr;
}

at::Tensor Number::tensor() const {
  at::Tensor made = c10::scalar_to_tensor(value);
  made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

bool Number::is(const at::Tensor& t) const {
  if (!t.defined() || t.dim() != 0 || !t.is_cpu() || !t.unsafeGetTensorImpl()->is_wrapped_number()) return false;
  const void* const bits = t.const_data_ptr();
  if (value.isBoolean()) return t.scalar_type() == at::kBool && *static_cast<const bool*>(bits) == value.toBool();
  if (value.isIntegral(false)) return t.scalar_type() == at::kLong && *static_cast<const int64_t*>(bits) == value.toLong();
  const double own = value.toDouble();
  return t.scalar_type() == at::kDouble && std::memcmp(bits, &own, sizeof own) == 0;
}

bool Window::is_all_of(const at::Tensor& base) const {
  const c10::TensorImpl& impl = *base.unsafeGetTensorImpl();
  return impl.sizes() == c10::IntArrayRef(size) && impl.strides() == c10::IntArrayRef(stride) && impl.storage_offset() == offset &&
      impl.dtype() == dtype;
}

at::Tensor Window::on(const at::Tensor& base) const {
  if (is_all_of(base)) return base;
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  made.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return made;
}

Prepared* prepare(const char* name, const char* overload, PyObject* args, PyObject* kwargs) {
  if (!PyList_Check(args) && !PyTuple_Check(args)) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) return nullptr;
  const c10::FunctionSchema& schema = op->schema();
  const auto& arguments = schema.arguments();
  const size_t given = PySequence_Fast_GET_SIZE(args);
  std::unique_ptr<Prepared> made(new Prepared{*op, std::vector<IValue>(arguments.size()), {}});
  Reader reader(made.get(), schema);
  Py_ssize_t named = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    PyObject* value = i < given ? PySequence_Fast_GET_ITEM(args, i) : PyDict_GetItemString(kwargs, arguments[i].name().c_str());
    named += i >= given && value != nullptr;
    if (value != nullptr) {
      if (!reader.read(i, value)) return nullptr;
    } else if (is_generator(*arguments[i].type())) {
      made->generator = static_cast<int64_t>(i);
    } else if (arguments[i].default_value()) {
      made->stack[i] = *arguments[i].default_value();
    } else {
      return nullptr;
    }
  }
  return given <= arguments.size() && named == PyDict_GET_SIZE(kwargs) ? made.release() : nullptr;
}

}  // namespace memopt
