#include "matching.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "hooks.h"
#include "lock.h"
#include "objects.h"
#include "progress.h"
#include "tensors.h"
#include "writing.h"

namespace memopt {

std::atomic<int64_t> native_ops = 0, python_ops = 0;

namespace {

namespace py = pybind11;
using c10::IValue;

template <typename List>
bool same_elements(const List& a, const List& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a.get(i) != b.get(i)) return false;
  return true;
}

// Whether two arguments that are not tensors mean the same to an op: 1 is not 1.0, and -0.0 is not 0.0.
bool same_constant(const IValue& a, const IValue& b) {
  if (a.isNone()) return b.isNone() || (b.isTensor() && !b.toTensor().defined());
  if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
  if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
  if (a.isDouble()) {
    if (!b.isDouble()) return false;
    const double x = a.toDouble(), y = b.toDouble();
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a.isIntList()) return b.isIntList() && same_elements(a.toIntList(), b.toIntList());
  if (a.isBoolList()) return b.isBoolList() && same_elements(a.toBoolList(), b.toBoolList());
  if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
  if (a.isDevice()) return b.isDevice() && a.toDevice() == b.toDevice();
  return false;
}

// Calls a method of the matcher as torch does, with the mode removed from the stack.
template <typename... Args>
py::object call_method(PyObject* matcher, const char* name, const Args&... args) {
  const torch::torch_dispatch_mode::StashTorchDispatchModeGuard stashed;
  return py::handle(matcher).attr(name)(args...);
}

// Compares the arguments of a call with its template, and adopts storages that come from outside.
class Comparison {
 public:
  Comparison(PyObject* matcher, const Forward& forward, const Template& expected, c10::ArrayRef<IValue> args)
      : matcher_(matcher), forward_(forward), expected_(expected), args_(args) {}

  bool startable = true;  // whether a rebuild can use all tensors that the op reads

  bool fits() {
    for (const size_t i : expected_.writes)
      if (i < args_.size() && is_on_tape(args_[i])) return false;
    if (!expected_.compared) {
      startable = false;
      for (const auto& [i, tensor] : expected_.mutates)
        if (i >= args_.size() || !args_[i].isTensor() || forward_.of_storage.at(args_[i].toTensor()) == nullptr) return false;
      return true;
    }
    const Prepared& given = *expected_.given;
    if (c10::GradMode::is_enabled() != expected_.grad) return false;
    size_t next = 0;  // of the inputs
    for (size_t i = 0; i < args_.size(); ++i) {
      if (next < given.inputs.size() && given.inputs[next].argument == i) {
        if (!inputs(i, &next)) return false;
      } else if (const Number* const number = given.number_at(i)) {
        if (!args_[i].isTensor() || !number->is(args_[i].toTensor())) return false;
      } else if (!given.is_ignored(i) && !same_constant(given.stack[i], args_[i])) {
        return false;
      }
    }
    return true;
  }

 private:
  bool is_on_tape(const IValue& value) const {
    if (value.isTensor()) {
      const at::Tensor& t = value.toTensor();
      return t.defined() && (!is_plain(t) || forward_.of_storage.at(t) != nullptr);
    }
    if (!value.isList()) return false;
    for (const IValue& each : value.toListRef())
      if (is_on_tape(each)) return true;
    return false;
  }

  bool inputs(size_t i, size_t* next) {
    const auto& all = expected_.given->inputs;
    if (all[*next].element < 0) return args_[i].isTensor() && input(all[(*next)++].window, args_[i].toTensor());
    if (!args_[i].isList()) return false;
    const auto values = args_[i].toListRef();
    if (values.size() != expected_.given->stack[i].toListRef().size()) return false;
    for (size_t k = 0; k < values.size(); ++k) {
      const bool is_input = *next < all.size() && all[*next].argument == i && all[*next].element == static_cast<int64_t>(k);
      const bool defined = values[k].isTensor() && values[k].toTensor().defined();
      if (is_input != defined || (is_input && !input(all[(*next)++].window, values[k].toTensor()))) return false;
    }
    return true;
  }

  // `Matcher.adopts`, for a tensor like that of an earlier step; none if Python must adopt it.
  py::object adopted(const at::Tensor& t, int64_t tensor) {
    PyObject* const known = PyDict_GetItemWithError(forward_.familiar.ptr(), py::int_(tensor).ptr());
    if (known == nullptr || forward_.versions.at(tensor) != nullptr) return py::none();
    const bool same_bytes = PyLong_AsSize_t(PyTuple_GET_ITEM(known, 0)) == t.storage().nbytes();
    if (!same_bytes || reinterpret_cast<THPDevice*>(PyTuple_GET_ITEM(known, 1))->device != t.device()) return py::none();
    const py::object objects[] = {wrapped(t), wrapped(t.is_view() ? at::Tensor(t._base()) : t)};
    bool is_parameter = false, is_plainly_none = t.storage().resizable();  // else it may be another library's memory
    for (const py::object& object : objects) {
      is_parameter = is_parameter || Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(ParameterClass);
      is_plainly_none = is_plainly_none && Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(THPVariableClass) &&
          !py::hasattr(object, "_is_param");
    }
    if (!is_parameter && !is_plainly_none) return py::none();
    const py::handle matcher(matcher_);
    const py::int_ id = matcher.attr("next_id");
    matcher.attr("next_id") = py::int_(id.cast<int64_t>() + 1);
    const NewVersion as{id.cast<int64_t>(), tensor, 0, py::none(), constants.external, constants.outside, true};
    const py::object version = new_version(t, as);
    value_of<Version>(version.ptr()).parameter = is_parameter;
    add(forward_, t, version);
    forward_.versions.put(tensor, version);
    return version;
  }

  bool input(const Window& window, const at::Tensor& t) {
    if (!is_ordinary(t) || t.is_conj() || t.is_neg() || !window.is_all_of(t)) return false;
    Version* known = forward_.of_storage.at(t);
    py::object owner;
    if (known == nullptr) {
      if (!is_plain(t)) return false;
      owner = adopted(t, window.version);
      if (owner.is_none()) owner = call_method(matcher_, "adopts", wrapped(t), py::int_(window.version));
      known = &expect<Version>(owner.ptr());
    } else if (!known->is_current(t)) {
      return false;
    }
    Version& version = *known;
    if (version.tensor != window.version && forward_.versions.at(window.version) != &version) return false;
    if (expected_.call.is_none()) return true;
    if (version.exposed) return false;
    version.read = true;
    if (!version.is_held() && version.is_external()) version.hold(t);
    if (!version.reachable && !version.is_held() && !version.is_empty()) startable = false;
    return true;
  }

  PyObject* matcher_;
  const Forward& forward_;
  const Template& expected_;
  c10::ArrayRef<IValue> args_;
};

// An op that matches its template.
struct Match {
  PyObject* matcher;
  const Forward& forward;
  const Templates::Sets& sets;
  const Template& expected;
};

// Holds a result if the plan holds it from its birth (`PlannedHoldings.hold`).
void hold_as_planned(const Match& match, const at::Tensor& t, const py::object& made) {
  Version& version = value_of<Version>(made.ptr());
  if (!match.sets.held.has(version.tensor)) return;
  if (match.expected.empty || match.sets.unsaved.has(version.tensor)) {
    call_method(match.matcher, "holds", wrapped(t), made);
    return;
  }
  version.hold(t);
  if (version.has_claim(constants.pinned_claim)) version.set_claim(constants.possible_claim);  // the plan knows all its readers
  if (version.call.is_none()) version.reachable = true;
  match.forward.active.add(version.tensor);
}

// Notes the results of an op that matched its template.
void note(const Match& match, const py::object& call, const Tensors& results, bool startable) {
  const auto& [matcher, forward, sets, expected] = match;
  const bool reachable = startable && !call.is_none() && !expected.empty;
  for (const auto& as : expected.made) {
    if (as.index >= results.size() || (!expected.compared && !is_plain(results[as.index]))) {
      call_method(matcher, "another_result");
      continue;
    }
    const at::Tensor& t = results[as.index];
    const bool sized = static_cast<int64_t>(t.storage().nbytes()) == as.nbytes || sets.sized_by_data.has(as.tensor);
    if (!sized || forward.of_storage.at(t) != nullptr) {
      call_method(matcher, "unforeseen", wrapped(t), py::int_(as.tensor));
      continue;
    }
    PyObject* const origin = expected.empty ? constants.empty : constants.recorded;
    const NewVersion made{as.tensor, as.tensor, as.index, as.again ? call : py::none(), origin, expected.why, reachable && as.again};
    const py::object version = new_version(t, made);
    add(forward, t, version);
    hold_as_planned(match, t, version);
  }
  if (!expected.unshared) return;
  for (const at::Tensor& t : results)
    if (Version* const version = forward.of_storage.at(t)) version->counter = constants.unshared;
}

// Notes that the op has written to `t`.
void note_written(const Match& match, const at::Tensor& t, int64_t tensor, const py::object& call, bool startable) {
  const py::object version = overwritten(match.forward, t, call, startable, tensor);
  if (version) {
    hold_as_planned(match, t, version);
  } else {
    call_method(match.matcher, "overwritten", wrapped(t), call, py::bool_(startable), py::int_(tensor));
  }
}

// Whether any tensor among the arguments has one of these keys.
bool have_any(c10::ArrayRef<IValue> args, c10::DispatchKeySet keys) {
  for (const IValue& value : args) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().key_set().has_any(keys)) return true;
    if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensor() && have_any(value.toListRef(), keys)) return true;
  }
  return false;
}

const c10::DispatchKeySet kSubclass(c10::DispatchKey::Python);
// Within a mode, torch runs some ops on these as if they were plain. Python knows which ops (record/rules.py).
const c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

std::unordered_set<c10::OperatorHandle>& in_python = *new std::unordered_set<c10::OperatorHandle>;

// Whether no Python code can run in an op, which could enter modes.
bool is_native(const c10::OperatorHandle& op) {
  return std::strncmp(op.operator_name().name.c_str(), "aten::", 6) == 0 && in_python.count(op) == 0;
}

// Runs an op with our mode off. If it is the only one and nothing asks which modes are on, it suffices to switch modes off, in a
// tenth of the time.
void run_unseen(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool native) {
  if (native && c10::impl::TorchDispatchModeTLS::stack_len() == 1) {
    const c10::impl::ExcludeDispatchKeyGuard unseen(kModes);
    op.callBoxed(stack);
  } else {
    const torch::torch_dispatch_mode::StashTorchDispatchModeGuard stashed;
    op.callBoxed(stack);
  }
}

// Whether an op takes less time than it takes to release the interpreter's lock, and to take it again: all its tensors are tiny,
// and on the CPU.
bool is_brief(const Template& expected, c10::ArrayRef<IValue> args) {
  constexpr int64_t kMost = 1 << 12;
  bool reads = false;
  for (const IValue& value : args) {
    if (value.isList() && !value.isIntList()) return false;
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const c10::TensorImpl& t = *value.unsafeToTensorImpl();
    if (!t.is_cpu() || t.numel() > kMost) return false;
    reads = true;
  }
  const auto is_tiny = [](const Template::Made& as) { return as.nbytes <= 8 * kMost; };
  return reads && expected.compared && std::all_of(expected.made.begin(), expected.made.end(), is_tiny);
}

void run(const Template& expected, const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::ArrayRef<IValue> args) {
  const bool native = is_native(op);
  if (native && is_brief(expected, args)) return run_unseen(op, stack, native);
  const Unlocked unlocked;
  run_unseen(op, stack, native);
}

// The call for this step, with the state of the generator from which the op is about to draw.
py::object with_state(PyObject* matcher, const Template& expected, c10::ArrayRef<IValue> args) {
  at::Device device = at::kCPU;
  for (const IValue& value : args) {
    if (value.isDevice()) device = value.toDevice();
    if (device.is_cpu() && value.isTensor() && value.toTensor().defined()) device = value.toTensor().device();
  }
  return call_method(matcher, "drawn", expected.call, wrapped(device));
}

enum class Answer {
  kPython,    // the Python matcher must run the op
  kCompared,  // it is to be compared with its template
  kPassesBy,  // the op must run, but nothing is noted
};

// The op has run, or runs next and nothing is noted of it.
void advance(const Forward& forward, Progress& cursor) {
  const int64_t next = ++cursor.position;
  if (next < PyBytes_GET_SIZE(forward.saving.ptr()) && PyBytes_AS_STRING(forward.saving.ptr())[next] == 0) {
    rest_hooks();
  } else {
    wake_hooks();
  }
}

// What is to be done with an op. Without the interpreter's lock: it reads what only this thread writes.
Answer answer_to(PyObject* matcher, const Forward& forward, const Templates& templates, const c10::OperatorHandle& op, c10::ArrayRef<IValue> args) {
  Progress& cursor = forward.cursor;
  if (!value_of<Matching>(matcher).capturing) return have_any(args, kSubclass | kLazyBits) ? Answer::kPython : Answer::kPassesBy;
  if (cursor.lost || !cursor.on_plan || cursor.fence < cursor.position) return Answer::kPython;
  if (cursor.position >= static_cast<int64_t>(templates.size()) || have_any(args, kSubclass)) return Answer::kPython;
  const c10::OperatorHandle* const passing = templates.passing(cursor.position);
  if (passing == nullptr) return c10::InferenceMode::is_enabled() ? Answer::kPython : Answer::kCompared;
  if (!(*passing == op)) return Answer::kPython;
  advance(forward, cursor);
  return Answer::kPassesBy;
}

// Runs the op if it matches its template, and notes what it made. Returns whether it did. With the interpreter's lock.
bool runs_as_before(
    PyObject* matcher, const Forward& forward, const Templates& templates, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Progress& cursor = forward.cursor;
  const auto owner = templates.at(cursor.position);  // another thread may learn another one while the op runs
  if (!owner) return false;
  const auto& expected = *static_cast<Template*>(PyCapsule_GetPointer(owner.ptr(), nullptr));
  if (!(expected.given->op == op)) return false;
  const auto args = torch::jit::last(*stack, op.schema().arguments().size());
  Comparison comparison(matcher, forward, expected, args);
  if (!comparison.fits()) return false;
  const py::object call = expected.random ? with_state(matcher, expected, args) : expected.call;
  Tensors targets;
  for (const auto& written : expected.mutates) {
    targets.push_back(args[written.argument].toTensor());
    if (!overwrites(forward, targets.back())) call_method(matcher, "overwrites", wrapped(targets.back()));
  }
  run(expected, op, stack, args);
  const Match match{matcher, forward, templates.sets, expected};
  note(match, call, tensors_in(torch::jit::last(*stack, op.schema().returns().size())), comparison.startable);
  for (size_t i = 0; i < targets.size(); ++i)
    note_written(match, targets[i], expected.mutates[i].tensor, call, comparison.startable);
  advance(forward, cursor);
  return true;
}

// `runs_as_before`, which takes the interpreter's lock.
bool runs_locked(
    PyObject* matcher, const Forward& forward, const Templates& templates, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Locked locked;
  try {
    return runs_as_before(matcher, forward, templates, op, stack);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
}

template <typename T>
const T* in_capsule(PyObject* object) {
  return object == nullptr || object == Py_None ? nullptr : static_cast<const T*>(PyCapsule_GetPointer(object, nullptr));
}

// The op of an overload. Overloads exist as long as the process.
const c10::OperatorHandle* op_of(PyObject* overload) {
  static auto& known = *new std::unordered_map<PyObject*, std::optional<c10::OperatorHandle>>;
  auto at = known.find(overload);
  if (at == known.end()) {
    const py::object schema = py::reinterpret_borrow<py::object>(overload).attr("_schema");
    const auto name = schema.attr("name").cast<std::string>(), own = schema.attr("overload_name").cast<std::string>();
    at = known.emplace(Py_NewRef(overload), c10::Dispatcher::singleton().findSchema({name, own})).first;
  }
  return at->second ? &*at->second : nullptr;
}

}  // namespace

bool add_matching(PyObject* module) {
  static PyMemberDef fields[] = {
      MEMOPT_FIELD(Matching, T_OBJECT, native, 0), MEMOPT_FIELD(Matching, T_OBJECT, templates, 0),
      MEMOPT_FIELD(Matching, T_BOOL, capturing, 0), kLastField};
  return add_type<Matching>(module, "Matching", {{Py_tp_members, fields}}, Py_TPFLAGS_BASETYPE);
}

void set_in_python(const std::vector<std::pair<std::string, std::string>>& names) {
  in_python.clear();
  for (const auto& [name, overload] : names)
    if (const auto op = c10::Dispatcher::singleton().findSchema({name, overload})) in_python.insert(*op);
}

void add(const Forward& forward, const at::Tensor& t, const py::object& version) {
  forward.of_storage.put(Versions::address_of(t), version);
  forward.versions.put(value_of<Version>(version.ptr()).id, version);
}

std::unique_ptr<Template> template_of(const py::dict& fields) {
  const py::object schema = fields["func"].attr("_schema"), args = fields["args"];
  const auto name = schema.attr("name").cast<std::string>(), overload = schema.attr("overload_name").cast<std::string>();
  auto made = std::make_unique<Template>();
  made->compared = !args.is_none();
  made->grad = fields["grad"].cast<bool>();
  made->empty = fields["empty"].cast<bool>();
  made->random = fields["random"].cast<bool>();
  made->unshared = fields["unshared"].cast<bool>();
  made->call = fields["call"];
  made->why = fields["why"];
  for (const py::handle result : fields["made"]) {
    const auto [index, tensor, nbytes, again] = result.cast<std::tuple<size_t, int64_t, int64_t, bool>>();
    made->made.push_back({index, tensor, nbytes, again});
  }
  for (const py::handle written : fields["mutates"]) {
    const auto [argument, tensor] = written.cast<std::tuple<size_t, int64_t>>();
    made->mutates.push_back({argument, tensor});
  }
  made->writes = fields["writes"].cast<std::vector<size_t>>();
  if (made->compared) {
    made->given.reset(prepare(name.c_str(), overload.c_str(), args.ptr(), fields["kwargs"].ptr()));
  } else if (const auto op = c10::Dispatcher::singleton().findSchema({name, overload})) {
    made->given.reset(new Prepared{*op, {}, {}});
  }
  return made->given == nullptr ? nullptr : std::move(made);
}

void Templates::learn(size_t position, PyObject* entry) {
  const bool is_template = PyCapsule_CheckExact(entry);
  templates_.at(position) = is_template ? py::reinterpret_borrow<py::object>(entry) : py::object();
  passing_[position].store(is_template || entry == Py_None ? nullptr : op_of(entry), std::memory_order_release);
}

bool runs(PyObject* matcher, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto* const forward = in_capsule<Forward>(value_of<Matching>(matcher).native.ptr());
  const auto* const templates = in_capsule<Templates>(value_of<Matching>(matcher).templates.ptr());
  const bool knows = forward != nullptr && templates != nullptr, native = is_native(op);
  const auto args = torch::jit::last(*stack, op.schema().arguments().size());
  const Answer answer = knows ? answer_to(matcher, *forward, *templates, op, args) : Answer::kPython;
  // what runs now may save tensors
  if (answer != Answer::kPassesBy || !native || !value_of<Matching>(matcher).capturing) wake_hooks();
  if (!knows) return false;
  if (answer == Answer::kPassesBy) run_unseen(op, stack, native);
  const bool done = answer == Answer::kPassesBy || (answer == Answer::kCompared && runs_locked(matcher, *forward, *templates, op, stack));
  (done ? native_ops : python_ops).fetch_add(1, std::memory_order_relaxed);
  return done;
}

}  // namespace memopt
