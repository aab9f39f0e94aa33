// The Python face of bytes and pages: summed, sealed, copied, taken from a socket.  Others may run Python meanwhile.
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <utility>

#include "host/xxh3.hpp"
#include "python/binding.hpp"

namespace penstock {
namespace {

constexpr size_t kPiece = 128 << 10;  // taken and hashed at once: small enough for any second cache
constexpr std::chrono::milliseconds kTell{5};  // that an arrived page may wait to be reported together with others

nb::bytes as_bytes(const Checksum& checksum) {
  return nb::bytes(reinterpret_cast<const char*>(checksum.data()), checksum.size());
}

nb::bytes sum_128(const In<uint8_t, 1>& data) {
  Checksum sum;
  {
    const nb::gil_scoped_release released;
    sum = xxh3_128(data.data(), data.size());
  }
  return as_bytes(sum);
}

uint64_t sum_64(const In<uint8_t, 1>& data, uint64_t seed) {
  require(data.size() >= kLeastRecord && data.size() <= kMostRecord, "a record has 97 to 128 bytes");
  return xxh3_64(data.data(), data.size(), seed);
}

void check_suffix(const nb::bytes& suffix) {
  require(suffix.size() >= 1 && suffix.size() <= kMaxSuffix, "a suffix has 1 to 1024 bytes");
}

Checksum sealed(const uint8_t* page, uint8_t* into, size_t bytes, const nb::bytes& suffix) {
  check_suffix(suffix);
  const auto* end = static_cast<const uint8_t*>(suffix.data());
  const size_t end_bytes = suffix.size();
  const nb::gil_scoped_release released;
  return xxh3_128_sealed(page, into, bytes, end, end_bytes);
}

nb::bytes seal_page(const In<uint8_t, 1>& page, const nb::bytes& suffix) {
  return as_bytes(sealed(page.data(), nullptr, page.size(), suffix));
}

nb::bytes copy_page(const In<uint8_t, 1>& page, const Out<uint8_t, 1>& into, const nb::bytes& suffix) {
  require(page.size() == into.size(), "pages have other sizes");
  return as_bytes(sealed(page.data(), into.data(), page.size(), suffix));
}

// Pages that come one behind the other over a socket, each straight to where it is to stand, and are hashed on the way.
// One thread takes them; any may stop that.
class PyArrivals {
 public:
  explicit PyArrivals(std::vector<Out<uint8_t, 1>> pages) : pages_(std::move(pages)) {
    for (const auto& page : pages_) {
      require(page.size() > 0, "a page has at least a byte");
      left_ += page.size();
      hashed_.emplace_back(page.data(), page.size());
    }
  }

  PyArrivals(const PyArrivals&) = delete;
  PyArrivals& operator=(const PyArrivals&) = delete;

  // Takes what comes until all of it is there, or `stop` is called, or a page is due to be reported, or
  // nothing came for so long.  How much that was; 0: nothing came, or it was stopped.  -1: the other end has hung up.
  long receive(int descriptor, double patience_s) {
    if (std::exchange(silent_, false)) return 0;
    Taking taking{descriptor, static_cast<int>(std::clamp(patience_s, 0.0, 1e6) * 1000)};
    {
      const nb::gil_scoped_release released;
      take_all(taking);
    }
    if (taking.failure != 0) {
      errno = taking.failure;
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
    return taking.bytes == 0 && taking.hung_up ? -1 : taking.bytes;
  }

  // Nothing more is written once this returns.
  void stop() {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(writing_);
    stopped_ = true;
  }

  nb::bytes checksum(size_t page, const nb::bytes& suffix) {
    check_suffix(suffix);
    require(page < done_, "that page is not there yet");
    return as_bytes(hashed_[page].sealed(static_cast<const uint8_t*>(suffix.data()), suffix.size()));
  }

  size_t done() const { return done_; }
  size_t left() const { return left_; }

 private:
  using Clock = std::chrono::steady_clock;

  // One call.
  struct Taking {
    int descriptor, patience_ms;
    long bytes = 0;
    int failure = 0;
    bool hung_up = false;
    Clock::time_point began = Clock::now();
  };

  void take_all(Taking& taking) {
    const size_t before = done_;
    while (left_ > 0) {
      const ssize_t got = piece(taking.descriptor);
      if (got > 0) {
        taking.bytes += got;
        if (done_ > before && Clock::now() - taking.began > kTell) return;
      } else if (got == 0) {
        taking.hung_up = true;
        return;
      } else if (errno == ECANCELED) {
        return;
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        const bool tells = done_ > before;
        if (wait(taking, tells ? std::min(left_to_tell(taking), taking.patience_ms) : taking.patience_ms)) continue;
        silent_ = !tells;
        return;
      } else if (errno != EINTR) {
        taking.failure = errno;
        return;
      }
    }
  }

  // Milliseconds until arrived pages are reported, though more is to come.
  static int left_to_tell(const Taking& taking) {
    const auto left = kTell - (Clock::now() - taking.began);
    return std::max(0, static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count()));
  }

  // As recv; ECANCELED after a stop.
  ssize_t piece(int descriptor) {
    uint8_t* page = pages_[done_].data();
    const size_t wanted = std::min(pages_[done_].size() - at_, kPiece);
    ssize_t got = -1;
    {
      const std::lock_guard lock(writing_);
      if (stopped_)
        errno = ECANCELED;
      else
        got = recv(descriptor, page + at_, wanted, MSG_DONTWAIT);
    }
    if (got <= 0) return got;
    at_ += got;
    left_ -= got;
    hashed_[done_].grew(at_);
    if (at_ == pages_[done_].size()) {
      ++done_;
      at_ = 0;
    }
    return got;
  }

  // Is something there within so long?
  static bool wait(Taking& taking, int wait_ms) {
    pollfd watched{taking.descriptor, POLLIN, 0};
    int ready;
    while ((ready = poll(&watched, 1, wait_ms)) < 0 && errno == EINTR) {
    }
    if (ready < 0) taking.failure = errno;
    return ready > 0;
  }

  std::vector<Out<uint8_t, 1>> pages_;
  std::vector<GrowingPage> hashed_;
  size_t done_ = 0, at_ = 0, left_ = 0;
  bool silent_ = false;  // nothing came for as long as was to be waited
  std::mutex writing_;    // of what follows, and held while a page is written
  bool stopped_ = false;
};

}  // namespace

void bind_pages(nb::module_& m) {
  m.def("xxh3_128", &sum_128);
  m.def("xxh3_64", &sum_64);
  m.def("seal_page", &seal_page);
  m.def("copy_page", &copy_page);
  nb::class_<PyArrivals>(m, "Arrivals")
      .def(nb::init<std::vector<Out<uint8_t, 1>>>())
      .def("receive", &PyArrivals::receive)
      .def("stop", &PyArrivals::stop)
      .def("checksum", &PyArrivals::checksum)
      .def_prop_ro("done", &PyArrivals::done)
      .def_prop_ro("left", &PyArrivals::left);
}

}  // namespace penstock
