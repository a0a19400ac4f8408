// What the engine's loop is compared with: the same libfabric calls on the same endpoint, written
// as a C programmer would for this one purpose. No ring, no credits, no errors but the first.
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef int64_t (*Call)(void*, void*, uint64_t);
struct Iov { uint64_t base, len; };
struct RmaIov { uint64_t addr, len, key; };
struct Msg { Iov* iov; uint64_t* desc; uint64_t count, addr; RmaIov* rma; uint64_t rma_count, context, data; };
struct Entry { uint64_t context, flags, len, buf, data; };
struct Target { uint64_t peer, remote, key; };
struct Twin { Call writemsg, read; void *ep, *cq; uint64_t contexts, depth, flags, local, desc, spin; };

static const uint64_t IMM = 1 << 17, ARRIVED = 1 << 13;
static int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static uint64_t idle;
// Completions of this rank's posts, and arrivals; below 0: an error.
static int poll(Twin* w, int64_t* sent, int64_t* came) {
  Entry entries[8];
  int64_t n = w->read(w->cq, entries, 8);
  if (n == -11) {
    if (++idle > w->spin) sched_yield();
    return 0;
  }
  if (n < 0) return (int)n;
  idle = 0;
  for (int64_t i = 0; i < n; i++) (entries[i].flags & ARRIVED ? *came : *sent)++;
  return 0;
}
static int post(Twin* w, Target* t, uint64_t nbytes, uint64_t slot, uint64_t more, int64_t* sent, int64_t* came) {
  Iov iov = {w->local, nbytes};
  RmaIov rma = {t->remote, nbytes, t->key};
  Msg m = {&iov, &w->desc, 1, t->peer, &rma, 1, w->contexts + 64 * (slot % w->depth), 7};
  int64_t code;
  while ((code = w->writemsg(w->ep, &m, w->flags | more)) == -11)
    if (poll(w, sent, came) < 0) return -1;
  return (int)code;
}
extern "C" {
// Nanoseconds for `count` writes, `window` of them in flight.
int64_t stream(Twin* w, Target* t, uint64_t nbytes, int64_t count, int64_t window) {
  int64_t sent = 0, came = 0, start = now();
  for (int64_t i = 0; i < count; i++) {
    while (i - sent >= window) if (poll(w, &sent, &came) < 0) return -1;
    if (post(w, t, nbytes, i, 0, &sent, &came) != 0) return -1;
  }
  while (sent < count) if (poll(w, &sent, &came) < 0) return -1;
  return now() - start;
}
// Nanoseconds for `count` round trips of a write with an immediate.
int64_t pingpong(Twin* w, Target* t, uint64_t nbytes, int64_t count, int first) {
  int64_t sent = 0, came = 0, start = now();
  for (int64_t i = 0; i < count; i++) {
    if (first && post(w, t, nbytes, i, IMM, &sent, &came) != 0) return -1;
    while (came <= i) if (poll(w, &sent, &came) < 0) return -1;
    if (!first && post(w, t, nbytes, i, IMM, &sent, &came) != 0) return -1;
  }
  int64_t end = now();
  while (sent < count) if (poll(w, &sent, &came) < 0) return -1;
  return end - start;
}
// In the place of writemsg, for both sides: notes when the last call of a burst returned.
Call real_writemsg;
int64_t last_post;
int64_t timed_writemsg(void* ep, void* msg, uint64_t flags) {
  int64_t code = real_writemsg(ep, msg, flags);
  last_post = now();
  return code;
}
// Nanoseconds to post one write to each of `n` peers; then waits for them.
int64_t burst(Twin* w, Target* t, int64_t n, uint64_t nbytes) {
  Twin timed = *w;
  timed.writemsg = timed_writemsg;
  int64_t sent = 0, came = 0, start = now();
  for (int64_t i = 0; i < n; i++) if (post(&timed, t + i, nbytes, i, 0, &sent, &came) != 0) return -1;
  int64_t end = last_post;
  while (sent < n) if (poll(w, &sent, &came) < 0) return -1;
  return end - start;
}
}
