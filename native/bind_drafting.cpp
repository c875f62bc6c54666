#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "successor_rows.hpp"
#include "suffix_automaton.hpp"

namespace paceline {
namespace {

template <class T>
nb::object array_of(const std::vector<T>& values) {
  const auto [array, elements] = new_array<T>({values.size()});
  std::copy(values.begin(), values.end(), elements);
  return array;
}

void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

int32_t known(const SuffixAutomaton& automaton, int32_t state) {
  if (state < 0 || state >= automaton.num_states()) throw std::out_of_range("no such state");
  return state;
}

void bind_suffix_automaton(nb::module_& module) {
  using Automaton = SuffixAutomaton;
  nb::class_<Automaton>(module, "SuffixAutomaton", "Does what draft.automaton.SuffixAutomaton does.")
      .def("__init__",
           [](Automaton* self, int32_t max_length) {
             check(max_length > 0, "max_length must be positive");
             new (self) Automaton(max_length);
           },
           nb::kw_only(), nb::arg("max_length"))
      .def_prop_ro("max_length", &Automaton::max_length)
      .def_prop_ro("num_tokens", &Automaton::num_tokens)
      .def_prop_ro("num_states", &Automaton::num_states)
      .def("length", [](const Automaton& self, int32_t state) { return self.length(known(self, state)); },
           nb::arg("state"))
      .def("count", [](const Automaton& self, int32_t state) { return self.count(known(self, state)); },
           nb::arg("state"))
      .def("num_followed", [](const Automaton& self, int32_t state) { return self.num_followed(known(self, state)); },
           nb::arg("state"))
      .def("target",
           [](const Automaton& self, int32_t state, int32_t token) { return self.target(known(self, state), token); },
           nb::arg("state"), nb::arg("token"))
      .def("longest_suffix",
           [](const Automaton& self, int32_t state) {
             check(known(self, state) != Automaton::kRoot, "the root has no suffix");
             return self.longest_suffix(state);
           },
           nb::arg("state"))
      .def("shorten",
           [](const Automaton& self, int32_t state, int32_t length, int32_t to) {
             check(length <= to || known(self, state) != Automaton::kRoot, "the root is as short as can be");
             return self.shorten(state, length, to);
           },
           nb::arg("state"), nb::arg("length"), nb::kw_only(), nb::arg("to"))
      .def("repeated_suffix", &Automaton::repeated_suffix)
      .def("find_suffix", &Automaton::find_suffix, nb::arg("tokens"))
      .def("followers",
           [](const Automaton& self, int32_t state, size_t limit) {
             check(limit > 0, "limit must be positive");
             nb::list found;
             for (const auto& [count, latest, token, target] : self.followers(known(self, state), limit))
               found.append(nb::make_tuple(count, latest, token, target));
             return found;
           },
           nb::arg("state"), nb::kw_only(), nb::arg("limit"))
      .def("grow",
           [](const Automaton& self, int32_t state, int32_t length, size_t num_nodes, double min_probability,
              bool chain) {
             check(length > 0, "a string has tokens");
             const GrownTree tree = self.grow(known(self, state), length, num_nodes, min_probability, chain);
             return nb::make_tuple(array_of(tree.token_ids), array_of(tree.parents), array_of(tree.confidence),
                                   tree.score);
           },
           nb::arg("state"), nb::arg("length"), nb::arg("num_nodes"), nb::kw_only(), nb::arg("min_probability"),
           nb::arg("chain"))
      .def("extend",
           [](Automaton& self, const std::vector<int32_t>& tokens) {
             for (const int32_t token : tokens) check(token >= Automaton::kSeparator, "no token");
             for (const int32_t token : tokens) self.append(token);
           },
           nb::arg("tokens"));
}

template <class T, int kDims>
using Writable = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

// The arrays of a table, kept for as long as their rows are.
class TableRows {
 public:
  TableRows(Writable<int32_t, 2> successors, Writable<uint8_t, 1> kinds, Writable<int64_t, 1> keys, Writable<double, 2> hits,
            Writable<double, 1> trials)
      : kept_(successors, kinds, keys, hits, trials), rows_(arrays(successors, kinds, keys, hits, trials)) {}

  SuccessorRows& rows() { return rows_; }

  int32_t token(int32_t id) const {
    check(0 <= id && id < rows_.arrays().vocab_size, "a token is outside the vocabulary");
    return id;
  }
  int32_t before(int32_t id) const { return id == -1 ? id : token(id); }

  struct Kept {
    Vector<int32_t> token_ids, parents;
    Table<int32_t> successors;
  };

  // seen: a draft.successor_rows.Seen, of which arrays are kept that the result points into.
  Seen read(nb::handle seen, std::vector<Kept>& kept) const {
    const auto& [token_ids, parents, successors] =
        kept.emplace_back(Kept{nb::cast<Vector<int32_t>>(seen[2]), nb::cast<Vector<int32_t>>(seen[3]),
                               nb::cast<Table<int32_t>>(seen[6])});
    Seen read{before(nb::cast<int32_t>(seen[0])),
              token(nb::cast<int32_t>(seen[1])),
              token_ids.data(),
              parents.data(),
              token_ids.size(),
              nb::cast<std::vector<int32_t>>(seen[4]),
              token(nb::cast<int32_t>(seen[5])),
              successors.data()};
    const auto num_nodes = static_cast<int32_t>(read.num_nodes), width = rows_.arrays().width;
    check(parents.size() == read.num_nodes && successors.shape(0) == read.num_nodes + 1 &&
              successors.shape(1) == static_cast<size_t>(width),
          "parents or successors do not fit the nodes");
    for (int32_t i = 0; i < num_nodes; i++) {
      token(read.token_ids[i]);
      check(-1 <= read.parents[i] && read.parents[i] < i, "a node comes before its parent");
    }
    for (const int32_t node : read.path) check(0 <= node && node < num_nodes, "the path leads outside the draft");
    for (size_t i = 0; i < successors.size(); i++) before(read.successors[i]);  // -1 where there are no more
    return read;
  }

 private:
  static SuccessorRows::Arrays arrays(const Writable<int32_t, 2>& successors, const Writable<uint8_t, 1>& kinds,
                                      const Writable<int64_t, 1>& keys, const Writable<double, 2>& hits,
                                      const Writable<double, 1>& trials) {
    const size_t rows = successors.shape(0), width = successors.shape(1), num_kinds = 2 * SuccessorRows::kNumStates;
    check(rows > SuccessorRows::kNumPairs && width > 0 && kinds.size() == rows &&
              keys.size() == SuccessorRows::kNumPairs && hits.shape(0) == num_kinds && hits.shape(1) == width &&
              trials.size() == num_kinds,
          "the arrays are not those of a table");
    for (size_t i = 0; i < rows; i++) check(kinds.data()[i] < num_kinds, "a row is of no kind");
    return {successors.data(), kinds.data(),  keys.data(),
            hits.data(),       trials.data(), static_cast<int32_t>(rows - SuccessorRows::kNumPairs),
            static_cast<int32_t>(width)};
  }

  std::tuple<Writable<int32_t, 2>, Writable<uint8_t, 1>, Writable<int64_t, 1>, Writable<double, 2>, Writable<double, 1>> kept_;
  SuccessorRows rows_;
};

void bind_successor_rows(nb::module_& module) {
  nb::class_<TableRows>(module, "SuccessorRows", "Does what draft.successor_rows.SuccessorRows does.")
      .def(nb::init<Writable<int32_t, 2>, Writable<uint8_t, 1>, Writable<int64_t, 1>, Writable<double, 2>, Writable<double, 1>>(),
           nb::arg("successors").noconvert(), nb::arg("kinds").noconvert(), nb::arg("keys").noconvert(),
           nb::arg("hits").noconvert(), nb::arg("trials").noconvert())
      .def_prop_ro("rates",
                   [](TableRows& self) {
                     const std::vector<double>& rates = self.rows().rates();
                     std::vector<std::vector<double>> by_kind;
                     for (auto at = rates.begin(); at != rates.end(); at += self.rows().arrays().width)
                       by_kind.emplace_back(at, at + self.rows().arrays().width);
                     return by_kind;
                   })
      .def("look",
           [](TableRows& self, int32_t before, int32_t token) {
             const auto [successors, kind] = self.rows().look(self.before(before), self.token(token));
             return std::pair(std::vector<int32_t>(successors, successors + self.rows().arrays().width), int{kind});
           },
           nb::arg("before"), nb::arg("token"))
      .def("grow",
           [](TableRows& self, int32_t before, int32_t root, size_t budget, double least_reach, bool chain) {
             const GrownTree tree =
                 self.rows().grow(self.before(before), self.token(root), budget, least_reach, chain);
             return nb::make_tuple(array_of(tree.token_ids), array_of(tree.parents), array_of(tree.confidence));
           },
           nb::arg("before"), nb::arg("root"), nb::arg("budget"), nb::kw_only(), nb::arg("least_reach"),
           nb::arg("chain"))
      .def("learn",
           [](TableRows& self, nb::list step) {
             std::vector<TableRows::Kept> kept;
             std::vector<Seen> seen;
             for (const nb::handle own : step) seen.push_back(self.read(own, kept));
             self.rows().learn(seen);
           },
           nb::arg("step"))
      .def("count",
           [](TableRows& self, int32_t before, int32_t token, int32_t following) {
             self.rows().count(self.before(before), self.token(token), following);
           },
           nb::arg("before"), nb::arg("token"), nb::arg("following"));
}

}  // namespace

void bind_drafting(nb::module_& module) {
  bind_suffix_automaton(module);
  bind_successor_rows(module);
}

}  // namespace paceline
