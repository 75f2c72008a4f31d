// The two entry points, and how heads and stretches are shared out among threads.
//
// With fewer heads than threads a head's chunks are cut into stretches: the states that enter them
// are collected first, all at once, then every stretch walks by itself.

#include <atomic>

#include "stretch.h"

namespace slay {
namespace {

// run body(worker, head, number) for all heads × `count` numbers; every thread has a worker from
// make(); false if memory ran out
template <class Make, class Body>
bool in_parallel(Index threads, Index heads, Index count, Make make, Body body) {
  std::atomic<bool> is_well{true};
  const Index jobs = heads * count;
#pragma omp parallel num_threads(static_cast<int>(std::min(threads, jobs))) \
    if (threads > 1 && jobs > 1)
  {
    decltype(make()) worker;
    try {
      worker = make();
    } catch (const std::bad_alloc&) {
      is_well = false;
    }
#pragma omp for schedule(dynamic, 1)
    for (Index job = 0; job < jobs; ++job) {
      if (!is_well) continue;
      try {
        body(*worker, job / count, job % count);
      } catch (const std::bad_alloc&) {
        is_well = false;
      }
    }
  }
  return is_well;
}

template <class Body>
bool walk(const Problem& problem, const Map& map, bool is_backward, Body body) {
  return in_parallel(
      problem.threads, problem.batch * problem.heads, problem.segments,
      [&] { return std::make_unique<Stretch>(problem, map, is_backward); },
      [&](Stretch& stretch, Index head, Index number) {
        stretch.choose(head / problem.heads, head % problem.heads);
        body(stretch, head, number);
      });
}

// The states with which the stretches of every head begin.
class Starts {
 public:
  Starts(const Problem& problem, const Map& map)
      : size_(map.features * (problem.value_width + 1)),
        count_(problem.segments),
        kept_(problem.batch * problem.heads * count_),
        states_(count_ > 1 ? problem.batch * problem.heads * count_ * size_ : 0) {}

  float* at(Index head, Index stretch) const { return states_ + (head * count_ + stretch) * size_; }
  void keep(Index head, Index stretch, bool is_kept) { kept_[head * count_ + stretch] = is_kept; }

  // turn what each stretch adds into the state before it; step 1 goes forward in time, −1 backward
  void accumulate(Index head, const float* before, Index step) {
    std::vector<float> state(size_, 0.0f);
    if (before) std::copy_n(before, size_, state.begin());
    const Index first = step > 0 ? 0 : count_ - 1;
    for (Index n = 0, i = first; n < count_; ++n, i += step) {
      float* added = at(head, i);
      const float old = kept_[head * count_ + i] ? 1.0f : 0.0f;
      for (Index j = 0; j < size_; ++j) {
        const float next = added[j] + old * state[j];
        added[j] = state[j];
        state[j] = next;
      }
    }
  }

 private:
  const Index size_, count_;
  std::vector<char> kept_;
  Buffer states_;
};

// the chunks of stretch `number`
struct Range {
  Index first, last;
};

Range range(const Problem& problem, Index chunks, Index number) {
  const Index each = (chunks + problem.segments - 1) / problem.segments;
  return {std::min(chunks, number * each), std::min(chunks, (number + 1) * each)};
}

bool forward(const Problem& problem) {
  const Map map(problem);
  const Index size = map.features * (problem.value_width + 1);
  Starts starts(problem, map);
  if (problem.segments > 1) {
    bool is_well = walk(problem, map, false, [&](Stretch& stretch, Index head, Index number) {
          const Range chunks = range(problem, stretch.chunks(), number);
          stretch.set_state(nullptr);
          starts.keep(head, number, stretch.collect_keys(chunks.first, chunks.last));
          stretch.get_state(starts.at(head, number));
        });
    if (!is_well) return false;
    for (Index head = 0; head < problem.batch * problem.heads; ++head)
      starts.accumulate(head, problem.has_past ? problem.memory + head * size : nullptr, 1);
  }
  return walk(problem, map, false, [&](Stretch& stretch, Index head, Index number) {
        const Range chunks = range(problem, stretch.chunks(), number);
        if (problem.segments > 1)
          stretch.set_state(starts.at(head, number));
        else if (stretch.has_state())
          stretch.set_state(problem.has_past ? problem.memory + head * size : nullptr);
        stretch.forward(chunks.first, chunks.last);
        if (problem.has_future && number == problem.segments - 1)
          stretch.get_state(problem.memory_after + head * size);
      });
}

bool backward(const Problem& problem) {
  const Map map(problem);
  const Index size = map.features * (problem.value_width + 1);
  Starts starts(problem, map), ends(problem, map);
  auto before = [&](Index head) {
    return problem.has_past ? problem.memory + head * size : nullptr;
  };
  auto after = [&](Index head) {
    return problem.has_future ? problem.d_memory_after + head * size : nullptr;
  };
  if (problem.segments > 1) {
    bool is_well = walk(problem, map, true, [&](Stretch& stretch, Index head, Index number) {
          const Range chunks = range(problem, stretch.chunks(), number);
          stretch.set_state(nullptr);
          starts.keep(head, number, stretch.collect_keys(chunks.first, chunks.last));
          stretch.get_state(starts.at(head, number));
          stretch.set_state(nullptr);
          ends.keep(head, number, stretch.collect_queries(chunks.first, chunks.last));
          stretch.get_state(ends.at(head, number));
        });
    if (!is_well) return false;
    for (Index head = 0; head < problem.batch * problem.heads; ++head) {
      starts.accumulate(head, before(head), 1);
      ends.accumulate(head, after(head), -1);
    }
  }
  return walk(problem, map, true, [&](Stretch& stretch, Index head, Index number) {
        const Range chunks = range(problem, stretch.chunks(), number);
        const bool is_cut = problem.segments > 1;
        if (stretch.has_state()) stretch.set_state(is_cut ? starts.at(head, number) : before(head));
        const Scalars scalars = stretch.backward_inside(chunks.first, chunks.last);
        problem.d_epsilon[head * problem.segments + number] = scalars.d_epsilon;
        problem.d_near_scale[head * problem.segments + number] = scalars.d_near_scale;
        if (stretch.has_state()) {
          stretch.set_state(is_cut ? ends.at(head, number) : after(head));
          stretch.backward_through_state(chunks.first, chunks.last);
          if (problem.has_past && number == 0) stretch.get_state(problem.d_memory + head * size);
        }
        stretch.finish(head * problem.segments + number);
      });
}

}  // namespace
}  // namespace slay

// Both return 0, or 1 if memory ran out.
extern "C" int slay_forward(const slay::Problem* problem) {
  return slay::forward(*problem) ? 0 : 1;
}

extern "C" int slay_backward(const slay::Problem* problem) {
  return slay::backward(*problem) ? 0 : 1;
}

// for a check that Python fills the same structures
extern "C" int64_t slay_bytes() {
  return sizeof(slay::Problem) + sizeof(slay::Projection);
}
