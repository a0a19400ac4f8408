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
// `patience`: ns without any completion after which a wait is given up; `sent`, `came`: how far it was.
struct Twin { Call writemsg, read; void *ep, *cq; uint64_t contexts, flags, local, desc, spin; int64_t patience, sent, came; };

static const uint64_t IMM = 1 << 17, ARRIVED = 1 << 13, LOOK_AFTER = 64;  // idle polls between looks at the clock
static const int64_t STUCK = -1000000;  // below every error number of libfabric
static int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static uint64_t idle;
static int64_t idle_since;
// After a poll that found nothing.
static int64_t rest(Twin* w) {
  if (++idle > w->spin) sched_yield();
  if (idle % LOOK_AFTER != 0) return 0;
  int64_t time = now();
  if (idle == LOOK_AFTER) idle_since = time;
  return time - idle_since > w->patience ? STUCK : 0;
}
// Completions of this rank's posts, and arrivals; below 0: an error.
static int64_t poll(Twin* w, int64_t* sent, int64_t* came) {
  Entry entries[8];
  int64_t n = w->read(w->cq, entries, 8);
  if (n == -11) return rest(w);
  if (n < 0) return n;
  idle = 0;
  for (int64_t i = 0; i < n; i++) (entries[i].flags & ARRIVED ? *came : *sent)++;
  return 0;
}
// One message for all posts, of which only what differs is written: as the engine's provider does.
// Building it anew took 15 ns longer per post over shm, where reads of it met stores still pending.
struct Message {
  Iov iov;
  RmaIov rma;
  alignas(64) Msg msg;
  Message(Twin* w, uint64_t nbytes) : iov{w->local, nbytes}, rma{0, nbytes, 0}, msg{&iov, &w->desc, 1, 0, &rma, 1, 0, 7} {}
};
static int64_t post(Twin* w, Message* m, Target* t, uint64_t slot, uint64_t more, int64_t* sent, int64_t* came) {
  m->rma.addr = t->remote;
  m->rma.key = t->key;
  m->msg.addr = t->peer;
  m->msg.context = w->contexts + 64 * (slot % 64);  // at most so many in flight
  int64_t code, polled;
  while ((code = w->writemsg(w->ep, &m->msg, w->flags | more)) == -11)
    if ((polled = poll(w, sent, came)) < 0) return polled;
  return code;
}
static int64_t failed(Twin* w, int64_t sent, int64_t came, int64_t code) {
  w->sent = sent;
  w->came = came;
  return code;
}
extern "C" {
// Nanoseconds for `count` writes, `window` of them in flight; below 0: an error.
int64_t stream(Twin* w, Target* t, uint64_t nbytes, int64_t count, int64_t window) {
  Message m(w, nbytes);
  int64_t sent = 0, came = 0, code = 0, start = now();
  idle = 0;
  for (int64_t i = 0; i < count; i++) {
    while (i - sent >= window) if ((code = poll(w, &sent, &came)) < 0) return failed(w, sent, came, code);
    if ((code = post(w, &m, t, i, 0, &sent, &came)) != 0) return failed(w, sent, came, code);
  }
  while (sent < count) if ((code = poll(w, &sent, &came)) < 0) return failed(w, sent, came, code);
  return now() - start;
}
// Nanoseconds for `count` round trips of a write with an immediate; below 0: an error.
int64_t pingpong(Twin* w, Target* t, uint64_t nbytes, int64_t count, int first) {
  Message m(w, nbytes);
  int64_t sent = 0, came = 0, code = 0, start = now();
  idle = 0;
  for (int64_t i = 0; i < count; i++) {
    if (first && (code = post(w, &m, t, i, IMM, &sent, &came)) != 0) return failed(w, sent, came, code);
    while (came <= i) if ((code = poll(w, &sent, &came)) < 0) return failed(w, sent, came, code);
    if (!first && (code = post(w, &m, t, i, IMM, &sent, &came)) != 0) return failed(w, sent, came, code);
  }
  int64_t end = now();
  while (sent < count) if ((code = poll(w, &sent, &came)) < 0) return failed(w, sent, came, code);
  return end - start;
}
// In the place of writemsg, for both sides: notes when the last call of a burst returned.
Call real_writemsg;
int64_t posts_left, last_post;
int64_t timed_writemsg(void* ep, void* msg, uint64_t flags) {
  int64_t code = real_writemsg(ep, msg, flags);
  if (code == 0 && --posts_left == 0) last_post = now();
  return code;
}
// One write to each of `n` peers, run by the engine's loop in the place of its own program: both sides
// have the same thread, the same caches, and the same turns without work behind them.
struct Burst { Twin* twin; Target* targets; int64_t n; uint64_t nbytes; int64_t turns, start, status; };
int64_t burst(Burst* b) {
  if (b->status != 1 || b->turns-- > 0) return 0;
  Twin timed = *b->twin;
  timed.writemsg = timed_writemsg;
  Message m(&timed, b->nbytes);
  int64_t sent = 0, came = 0, code = 0;
  idle = 0;
  b->start = now();
  for (int64_t i = 0; i < b->n && code == 0; i++)
    code = post(&timed, &m, b->targets + i, i, 0, &sent, &came);
  while (code == 0 && sent < b->n) code = poll(b->twin, &sent, &came);
  b->status = failed(b->twin, sent, came, code);
  return 1;
}
// What movers do for a door, in as few writes as the bytes allow: at `start` by the clock one to each of
// `n` peers, with an immediate, while `expected` come. The loop runs it as it runs a burst, from before
// any rank starts until all of this rank's is over: so it takes nothing that comes here.
struct Part { Target target; uint64_t local, nbytes; };
struct Exchange { Twin* twin; Part* parts; int64_t n, expected, start, begun, end, status; };
int64_t exchange(Exchange* e) {
  if (e->status != 1) return 0;
  const timespec nap = {0, 50000};  // as long as the loop's, which waits for the same moment
  Message m(e->twin, 0);
  int64_t sent = 0, came = 0, code = 0, start;
  idle = 0;
  while (code == 0 && ((start = __atomic_load_n(&e->start, __ATOMIC_ACQUIRE)) == 0 || now() < start)) {
    nanosleep(&nap, 0);
    code = poll(e->twin, &sent, &came);
  }
  e->begun = now();
  for (int64_t i = 0; i < e->n && code == 0; i++) {
    Part* part = e->parts + i;
    m.iov = {part->local, part->nbytes};
    m.rma.len = part->nbytes;
    code = post(e->twin, &m, &part->target, i, IMM, &sent, &came);
  }
  while (code == 0 && (sent < e->n || came < e->expected)) {
    code = poll(e->twin, &sent, &came);
    if (e->end == 0 && came >= e->expected) e->end = now();
  }
  if (e->end == 0) e->end = now();
  __atomic_store_n(&e->status, failed(e->twin, sent, came, code), __ATOMIC_RELEASE);
  return 1;
}
}
