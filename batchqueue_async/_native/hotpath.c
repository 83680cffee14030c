/* The hot path of queue and bridge, compiled: what an item costs each time, and nothing else.
 *
 * Each function here stands for a few lines of Python, which its comment names. The Python stays the reference and the
 * fallback: a function takes the usual case, whole, and leaves everything else to the Python of the same name, before
 * it has changed anything. So no error message, no wait and no rule exists twice.
 *
 * What keeps it safe:
 *
 * - Between its last look and its last step a function runs no code of the user's: no hash, no comparison, no
 *   finalizer. A type is looked up only if its metaclass has the hash and the comparison of `type`.
 * - Where code of the user's could run in between (a key that only happens to have the same hash is compared), strong
 *   references are held, and sizes are read anew.
 * - Every object that refers to others is known to the garbage collector, and can be cleared at any time: every field
 *   may be NULL or an object of any class, and is looked at before each use.
 * - The interpreter's lock (GIL) makes each function one step for all threads. There is no build for free threading.
 *
 * docs/contributing/native.md is the page for whoever changes this.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "the hot path relies on the GIL; a free-threaded build of Python runs the Python in its place"
#endif

/* What is used of Python by name, and objects of which there is one: made with the module, and kept. */
static PyTypeObject *deque_type;
static PyObject *name_append, *name_popleft, *name_lingers, *name_leave, *name_record, *name_put_at, *name_wait_at;
static PyObject *name_refill;
static PyObject *no_call;         /* what `call_usual` answers with where nothing is to be awaited */
static PyObject *on_ready_method; /* DrainTask.on_ready, as the class has it */

/* Raised whenever Python and C have to change together: a file that was built before is then not used. */
#define API 7

/* Ask for memory that is needed soon. */
#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* For what is called with functions that are known as it is compiled. */
#if defined(__GNUC__) || defined(__clang__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#endif

/* isinstance(op, type), where the class is most often a child or a grandchild of the type. */
static inline int
is_kind(PyObject *op, PyTypeObject *type)
{
    PyTypeObject *kind = Py_TYPE(op);
    if (kind == type || kind->tp_base == type || (kind->tp_base != NULL && kind->tp_base->tp_base == type)) {
        return 1;
    }
    return PyType_IsSubtype(kind, type);
}

/* The same for many objects, most of which are of the class that was the right one before. */
static inline int
is_kind_again(PyObject *op, PyTypeObject *type, PyTypeObject **sure)
{
    if (Py_TYPE(op) == *sure) {
        return 1;
    }
    int right = is_kind(op, type);
    *sure = right ? Py_TYPE(op) : *sure;
    return right;
}

/* Give a list room for so many items. Its memory is Python's for raw memory (PyMem), as in every Python that this was
 * built for; in a later one nothing happens, and the list grows by itself. It runs nobody's code: -1 for want of memory. */
static int
list_reserve(PyObject *op, Py_ssize_t places)
{
#if PY_VERSION_HEX < 0x030F0000
    PyListObject *list = (PyListObject *)op;
    if (places > list->allocated) {
        if (places > PY_SSIZE_T_MAX / (Py_ssize_t)sizeof(PyObject *)) {
            PyErr_NoMemory();
            return -1;
        }
        PyObject **items = PyMem_Realloc(list->ob_item, (size_t)places * sizeof(PyObject *));
        if (items == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        list->ob_item = items;
        list->allocated = places;
    }
#else
    (void)op;
    (void)places;
#endif
    return 0;
}

/* list.append(item), inline where the list has a place left. An empty list gets as many places as are expected, and a
 * full one grows by half: by an eighth, as Python has it, a long list would be copied eight times over. */
static int
list_append_growing(PyObject *list, PyObject *item, Py_ssize_t expected)
{
    Py_ssize_t size = PyList_GET_SIZE(list);
    Py_ssize_t more = size + size / 2;
    if ((more >= 8 || expected >= 8) && list_reserve(list, more > expected ? more : expected) < 0) {
        return -1;
    }
    return PyList_Append(list, item);
}

static inline int
list_append(PyObject *list, PyObject *item, Py_ssize_t expected)
{
    Py_ssize_t size = PyList_GET_SIZE(list);
    if (size >= ((PyListObject *)list)->allocated) {
        return list_append_growing(list, item, expected);
    }
    PyList_SET_ITEM(list, size, Py_NewRef(item));
    Py_SET_SIZE(list, size + 1);
    return 0;
}

/* list.extend(items), where the items are not those of the list itself: all, or none for want of memory. */
static int
list_extend(PyObject *list, PyObject *const *items, Py_ssize_t count, Py_ssize_t expected)
{
    Py_ssize_t size = PyList_GET_SIZE(list);
    if (size + count > ((PyListObject *)list)->allocated) {
        Py_ssize_t more = size + size / 2;
        more = more > expected ? more : expected;
        if (list_reserve(list, more > size + count ? more : size + count) < 0) {
            return -1;
        }
    }
    if (size + count <= ((PyListObject *)list)->allocated) {
        PyObject **into = &((PyListObject *)list)->ob_item[size];
        for (Py_ssize_t index = 0; index < count; index++) {
            PyObject *item = items[index];
            into[index] = Py_NewRef(item);
        }
        Py_SET_SIZE(list, size + count);
        return 0;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        if (PyList_Append(list, items[index]) < 0) {
            PyObject *type, *value, *traceback;
            PyErr_Fetch(&type, &value, &traceback);
            PyList_SetSlice(list, size, PyList_GET_SIZE(list), NULL);
            PyErr_Restore(type, value, traceback);
            return -1;
        }
    }
    return 0;
}

/* -- Countdown: itertools.repeat(None, n), whose count can be read and taken from C ------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_ssize_t left;
} Countdown;

static PyTypeObject CountdownType;

static PyObject *
countdown_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *ignored;
    Py_ssize_t left;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Countdown() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "On:Countdown", &ignored, &left)) {
        return NULL;
    }
    Countdown *self = (Countdown *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->left = left > 0 ? left : 0;
    }
    return (PyObject *)self;
}

/* next(slots) */
static PyObject *
countdown_next(PyObject *op)
{
    Countdown *self = (Countdown *)op;
    if (self->left <= 0) {
        return NULL;
    }
    self->left--;
    Py_RETURN_NONE;
}

static PyObject *
countdown_length_hint(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromSsize_t(((Countdown *)op)->left);
}

static PyObject *
countdown_repr(PyObject *op)
{
    return PyUnicode_FromFormat("Countdown(None, %zd)", ((Countdown *)op)->left);
}

static PyMethodDef countdown_methods[] = {
    {"__length_hint__", countdown_length_hint, METH_NOARGS, "How many are left."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CountdownType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batchqueue_async._native.hotpath.Countdown",
    .tp_doc = "Counts places down: an iterator over so many times None.",
    .tp_basicsize = sizeof(Countdown),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = countdown_new,
    .tp_repr = countdown_repr,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = countdown_next,
    .tp_methods = countdown_methods,
};

/* -- Turns: itertools.count(), whose next number can be read, and is taken only where it is used --------------------- */

typedef struct {
    PyObject_HEAD
    unsigned long long next;
} Turns;

static PyObject *
turns_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned long long next = 0;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Turns() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "|K:Turns", &next)) {
        return NULL;
    }
    Turns *self = (Turns *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->next = next;
    }
    return (PyObject *)self;
}

/* next(turns) */
static PyObject *
turns_next(PyObject *op)
{
    return PyLong_FromUnsignedLongLong(((Turns *)op)->next++);
}

static PyTypeObject TurnsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batchqueue_async._native.hotpath.Turns",
    .tp_doc = "Numbers from 0 on: an iterator without an end.",
    .tp_basicsize = sizeof(Turns),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = turns_new,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = turns_next,
};

#include "fields.h"

/* -- Place: where an item goes -------------------------------------------------------------------------------------- */

/*     for _ in route.fast_slots:
 *         route.tail.append(item)
 *         return True
 *
 * 1: the item is in. 0: there is no fast slot, or this is not a place as it should be; nothing has happened. -1: no
 * memory. It runs no code but its own.
 */
static inline int
place_put(PyObject *route, PyObject *item, PyTypeObject **sure)
{
    if (!is_kind_again(route, &PlaceType, sure)) {
        return 0;
    }
    PyObject *slots = ((Place *)route)->fast_slots;
    PyObject *tail = ((Place *)route)->tail;
    if (slots == NULL || !Py_IS_TYPE(slots, &CountdownType) || ((Countdown *)slots)->left <= 0) {
        return 0;
    }
    if (tail == NULL || !PyList_CheckExact(tail)) {
        return 0;
    }
    if (list_append(tail, item, ((Place *)route)->batch) < 0) {
        return -1;
    }
    ((Countdown *)slots)->left--;
    return 1;
}

/* Partition.offer_many, where all items find fast slots: 1, 0 for the Python, or -1. It runs no code but its own. */
static int
place_put_many(PyObject *route, PyObject *items)
{
    if (!is_kind(route, &PlaceType)) {
        return 0;
    }
    PyObject *slots = ((Place *)route)->fast_slots;
    PyObject *tail = ((Place *)route)->tail;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    if (slots == NULL || !Py_IS_TYPE(slots, &CountdownType) || count <= 0 || ((Countdown *)slots)->left < count
        || tail == NULL || !PyList_CheckExact(tail) || tail == items) {
        return 0;
    }
    /* What goes into a partition beside its lanes is not counted by the countdown. */
    if (is_kind(route, &PartitionFieldsType) && ((PartitionFields *)route)->lanes != Py_None) {
        return 0;
    }
    if (list_extend(tail, PySequence_Fast_ITEMS(items), count, ((Place *)route)->batch) < 0) {
        return -1;
    }
    ((Countdown *)slots)->left -= count;
    return 1;
}

static Countdown *no_slots; /* a countdown that is over, for everybody */

/* -- by type ------------------------------------------------------------------------------------------------------ */

#include "table.h"

static PyObject *call_begun(PyObject *coroutine, PyObject *given);

#include "drain.h"

/* A route's place takes an item: in a fast slot, or as the first of an empty partition. As `place_put`. */
static int
route_put(PyObject *route, PyObject *item, PyTypeObject **sure)
{
    int put = place_put(route, item, sure);
    return put != 0 ? put : put_first(route, item, NULL);
}

/* -- Entrance: the queue, as a producer sees it --------------------------------------------------------------------- */

/* The same for a type that has to be looked up in the dict. */
static int
entrance_look_up(PyObject *by_type, PyObject *item)
{
    PyObject *route = look_up(by_type, Py_TYPE(item));
    if (route == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_KeyError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    PyTypeObject *sure = NULL;
    int put = route_put(route, item, &sure);
    Py_DECREF(route);
    return put;
}

/* router.partitions[index], as long as nothing moves to more partitions: a new reference, or NULL. */
static PyObject *
router_place(RouterFields *router, Py_ssize_t index)
{
    PyObject *partitions = router->partitions, *fences = router->fences;
    if (partitions == NULL || !PyList_CheckExact(partitions) || router->width > PyList_GET_SIZE(partitions)
        || index >= router->width || fences == NULL || !PyList_CheckExact(fences) || PyList_GET_SIZE(fences) != 0) {
        return NULL;
    }
    return Py_NewRef(PyList_GET_ITEM(partitions, index));
}

/* The index that by_key(key) gives: hash(key(item)) % width; -1 for an error of theirs. Code of the user's runs here. */
static Py_ssize_t
index_by_key(PyObject *key, PyObject *item, Py_ssize_t width)
{
    PyObject *found = PyObject_CallOneArg(key, item);
    Py_hash_t hash = found == NULL ? -1 : PyObject_Hash(found);
    Py_XDECREF(found);
    if (hash == -1) {
        return -1;
    }
    Py_ssize_t index = hash % width;
    return index < 0 ? index + width : index;
}

/* `entrance_put` for round_robin(): a turn is taken only if the item comes in. */
static int
put_in_turn(RouterFields *router, PyObject *item)
{
    Turns *turns = (Turns *)Py_NewRef(router->turns);
    PyObject *route = router->width <= 0 ? NULL : router_place(router, (Py_ssize_t)(turns->next % (size_t)router->width));
    int put = 0;
    if (route != NULL) {
        PyTypeObject *sure = NULL;
        unsigned long long mine = turns->next++;
        put = route_put(route, item, &sure);
        if (put <= 0 && turns->next == mine + 1) {
            turns->next = mine;
        }
    }
    Py_XDECREF(route);
    Py_DECREF(turns);
    return put;
}

/* `entrance_put` for by_key(): 0 with a route, as a new reference, where that was asked for and has no fast slot. */
static int
put_by_key(Entrance *self, RouterFields *router, PyObject *item, PyObject **asked)
{
    Py_ssize_t width = router->width;
    if (width <= 0 || router->fences == NULL || !PyList_CheckExact(router->fences) || PyList_GET_SIZE(router->fences) != 0) {
        return 0;
    }
    PyObject *key = Py_NewRef(router->key);
    Py_ssize_t index = index_by_key(key, item, width);
    Py_DECREF(key);
    if (index < 0) {
        return -1;
    }
    PyObject *route = router->width == width ? router_place(router, index) : NULL;
    if (route == NULL) {
        return 0; /* the queue has grown meanwhile */
    }
    PyTypeObject *sure = NULL;
    int put = self->thread == 0 ? 0 : route_put(route, item, &sure); /* or it was closed: the Python says so */
    if (put == 0) {
        *asked = route;
    }
    else {
        Py_DECREF(route);
    }
    return put;
}

/* BatchQueue.produce_nowait, as far as the thread is right, the route is known, and a place is free.
 *
 * 1: the item is in. 0: it is for the Python; nothing has happened, but that a key function may have been asked: then its
 * answer is the route in `asked`, a new reference. -1: an error. */
static int
entrance_put(PyObject *op, PyObject *item, PyObject **asked)
{
    Entrance *self = (Entrance *)op;
    *asked = NULL;
    if (self->thread == 0 || self->thread != PyThread_get_thread_ident()) {
        return 0;
    }
    PyObject *route = self->only;
    if (route == NULL || route == Py_None) {
        PyObject *by_type = self->by_type;
        if (!is_by_type(by_type)) {
            if (self->router == NULL || !is_kind(self->router, &RouterFieldsType)) {
                return 0;
            }
            RouterFields *router = (RouterFields *)Py_NewRef(self->router);
            int put = 0;
            if (router->turns != NULL && Py_IS_TYPE(router->turns, &TurnsType)) {
                put = put_in_turn(router, item);
            }
            else if (router->key != NULL && router->key != Py_None) {
                put = put_by_key(self, router, item, asked);
            }
            Py_DECREF(router);
            return put;
        }
        route = Py_IS_TYPE(by_type, &TypeTableType) ? table_known((TypeTable *)by_type, Py_TYPE(item)) : NULL;
        if (route == NULL) {
            return entrance_look_up(by_type, item);
        }
    }
    PyTypeObject *sure = NULL;
    int put = place_put(route, item, &sure); /* nobody's code runs up to here, so that nothing need be held */
    if (put == 0) {
        Py_INCREF(route);
        put = put_first(route, item, NULL);
        Py_DECREF(route);
    }
    return put;
}

/* -- the bridge ----------------------------------------------------------------------------------------------------- */

/* threading.RLock, of which C can see whether anybody has it. `count` is 0 exactly while nobody does. */
typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner;
    unsigned long count;
} InboxLock;

static PyTypeObject InboxLockType;

static PyObject *
lock_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    if (!PyArg_ParseTuple(args, ":InboxLock")) {
        return NULL;
    }
    InboxLock *self = (InboxLock *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->lock = PyThread_allocate_lock();
    if (self->lock == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void
lock_dealloc(PyObject *op)
{
    InboxLock *self = (InboxLock *)op;
    if (self->lock != NULL) {
        if (self->count != 0) {
            PyThread_release_lock(self->lock);
        }
        PyThread_free_lock(self->lock);
    }
    Py_TYPE(op)->tp_free(op);
}

/* lock.acquire(): a signal's handler runs during the wait, and an error of it ends the wait without the lock. */
static PyObject *
lock_acquire(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    InboxLock *self = (InboxLock *)op;
    unsigned long me = PyThread_get_thread_ident();
    if (self->count != 0 && self->owner == me) {
        self->count++;
        Py_RETURN_TRUE;
    }
    if (!PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) {
        PyLockStatus status;
        do {
            Py_BEGIN_ALLOW_THREADS
            status = PyThread_acquire_lock_timed(self->lock, -1, 1);
            Py_END_ALLOW_THREADS
            if (status == PY_LOCK_INTR && Py_MakePendingCalls() < 0) {
                return NULL;
            }
        } while (status != PY_LOCK_ACQUIRED);
    }
    self->owner = me;
    self->count = 1;
    Py_RETURN_TRUE;
}

static PyObject *
lock_release(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    InboxLock *self = (InboxLock *)op;
    if (self->count == 0 || self->owner != PyThread_get_thread_ident()) {
        PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
        return NULL;
    }
    if (--self->count == 0) {
        self->owner = 0;
        PyThread_release_lock(self->lock);
    }
    Py_RETURN_NONE;
}

static PyObject *
lock_is_owned(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    InboxLock *self = (InboxLock *)op;
    return PyBool_FromLong(self->count != 0 && self->owner == PyThread_get_thread_ident());
}

static PyObject *
lock_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return lock_release(op, NULL);
}

static PyMethodDef lock_methods[] = {
    {"acquire", lock_acquire, METH_NOARGS, "Wait for the lock, and take it."},
    {"release", lock_release, METH_NOARGS, "Give the lock back."},
    {"_is_owned", lock_is_owned, METH_NOARGS, "Whether this thread has the lock."},
    {"__enter__", lock_acquire, METH_NOARGS, NULL},
    {"__exit__", lock_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject InboxLockType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batchqueue_async._native.hotpath.InboxLock",
    .tp_doc = "A lock that its holder may take again.",
    .tp_basicsize = sizeof(InboxLock),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = lock_new,
    .tp_dealloc = lock_dealloc,
    .tp_methods = lock_methods,
};

/* PartitionCredits.add, where the oldest item does not make room: 1, 0 for the Python, -1 for want of memory. */
static inline int
share_put(PyObject *op, PyObject *item, PyTypeObject **sure)
{
    if (!is_kind_again(op, &ShareType, sure)) {
        return 0;
    }
    Share *share = (Share *)op;
    if (share->free <= 0 || share->items == NULL || !PyList_CheckExact(share->items)) {
        return 0;
    }
    if (list_append(share->items, item, share->batch) < 0) {
        return -1;
    }
    share->free--;
    return 1;
}

/* Whether a thread may put something in now, in one step: nobody has the lock, and the loop is on its way. Nobody can
 * take the lock before the step has ended, since this thread has the GIL until then. */
static int
inbox_is_open(Inbox *self)
{
    return self->waking && self->lock != NULL && Py_IS_TYPE(self->lock, &InboxLockType)
           && ((InboxLock *)self->lock)->count == 0;
}

/* inbox._shares[index]: a new reference, or NULL. */
static PyObject *
share_at(Inbox *inbox, Py_ssize_t index)
{
    PyObject *shares = inbox->shares;
    if (shares == NULL || !PyList_CheckExact(shares) || index < 0 || index >= PyList_GET_SIZE(shares)) {
        return NULL;
    }
    return Py_NewRef(PyList_GET_ITEM(shares, index));
}

/* A share takes an item in, in one step: 1, 0 for the Python, or -1. */
static int
inbox_put(Inbox *inbox, PyObject *share, PyObject *item)
{
    PyTypeObject *sure = NULL;
    return share != NULL && inbox_is_open(inbox) ? share_put(share, item, &sure) : 0;
}

/* `step_thread_produce` for round_robin(): a turn is taken only if the item comes in. */
static int
inbox_put_in_turn(Inbox *inbox, PyObject *item)
{
    Py_ssize_t count = inbox->shares != NULL && PyList_CheckExact(inbox->shares) ? PyList_GET_SIZE(inbox->shares) : 0;
    PyObject *share = count == 0 ? NULL : share_at(inbox, inbox->turn % count);
    int put = inbox_put(inbox, share, item);
    inbox->turn += put > 0;
    Py_XDECREF(share);
    return put;
}

/* SyncQueue.produce(item), as far as the item's share is known and has a place, and the loop was asked to collect. Where a
 * key function was asked in vain, `_produce_asked` goes on with what it said. */
static PyObject *
step_thread_produce(PyObject *Py_UNUSED(function), PyObject *op, PyObject *item)
{
    PyObject *found = ((Door *)op)->inbox;
    if (found == NULL || !is_kind(found, &InboxType)) {
        return NULL;
    }
    Inbox *inbox = (Inbox *)Py_NewRef(found);
    PyObject *share = NULL, *result = NULL;
    Py_ssize_t index = -1, width = inbox->width;
    int put = 0;
    if (inbox_is_open(inbox)) { /* where another thread is in there, nothing is looked up twice */
        if (inbox->only != NULL && inbox->only != Py_None) {
            share = Py_NewRef(inbox->only);
            put = inbox_put(inbox, share, item);
        }
        else if (is_by_type(inbox->by_type)) {
            share = look_up(inbox->by_type, Py_TYPE(item));
            /* The look-up may have run code of the user's, and other threads: look again. */
            put = share == NULL && PyErr_Occurred() ? -1 : inbox_put(inbox, share, item);
        }
        else if (inbox->turn >= 0) {
            put = inbox_put_in_turn(inbox, item);
        }
        else if (inbox->key != NULL && inbox->key != Py_None && width > 0) {
            PyObject *key = Py_NewRef(inbox->key);
            index = index_by_key(key, item, width);
            Py_DECREF(key);
            share = index >= 0 && inbox->width == width ? share_at(inbox, index) : NULL;
            put = index < 0 ? -1 : inbox_put(inbox, share, item);
        }
    }
    if (put > 0) {
        result = Py_NewRef(Py_True);
    }
    else if (put == 0 && index >= 0) {
        result = PyObject_CallMethod(op, "_produce_asked", "Onn", item, index, width);
    }
    Py_XDECREF(share);
    Py_DECREF(inbox);
    return result;
}

/* The first items of a list, each into the share of its type, up to the first that is not known or has no place: how many.
 * Nobody's code runs. */
static Py_ssize_t thread_put_run(PyObject *by_type, PyObject *batch);

/* SyncQueue.produce_many(list), as far as all items go to the only share, which has places for them, or each to the share
 * of its type. What comes in of the latter are the first ones: with the others `_produce_rest` goes on. */
static PyObject *
step_thread_produce_many(PyObject *Py_UNUSED(function), PyObject *op, PyObject *batch)
{
    Inbox *inbox = (Inbox *)((Door *)op)->inbox;
    if (inbox == NULL || !is_kind((PyObject *)inbox, &InboxType) || !inbox_is_open(inbox) || !PyList_CheckExact(batch)) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(batch);
    if (inbox->only == Py_None && inbox->by_type != NULL && Py_IS_TYPE(inbox->by_type, &TypeTableType)) {
        Py_ssize_t put = thread_put_run(inbox->by_type, batch);
        PyErr_Clear(); /* for want of memory, say: the Python goes on, and meets it again */
        return put == count ? PyLong_FromSsize_t(put)
               : put == 0   ? NULL
                            : PyObject_CallMethod(op, "_produce_rest", "On", batch, put);
    }
    if (inbox->only == NULL || !is_kind(inbox->only, &ShareType)) {
        return NULL;
    }
    Share *share = (Share *)inbox->only;
    if (share->free < count || share->items == NULL || !PyList_CheckExact(share->items) || share->items == batch) {
        return NULL;
    }
    if (list_extend(share->items, PySequence_Fast_ITEMS(batch), count, share->batch) < 0) {
        return NULL;
    }
    share->free -= count;
    return PyLong_FromSsize_t(count);
}

/* -- Call: what `await queue.produce(item)` awaits ---------------------------------------------------------------- */

/* A coroutine as Python makes one, in three states:
 *
 * - not begun: `queue` and `item` are there. Nothing has been put in; whoever drops it gets the usual warning.
 * - handed to the Python: `inner` is the coroutine of the Python `produce`, to which everything is passed on.
 * - done: neither.
 *
 * And one that `call_begun` makes: a handler's coroutine (`inner`) whose first step was made already. What that step
 * has given is given again at the first step, be it a value (`given`) or an exception (`error`).
 */
typedef struct {
    PyObject_HEAD
    PyObject *function;
    PyObject *queue;
    PyObject *item;
    PyObject *inner;
    PyObject *given;
    PyObject *error;
    PyObject *weakrefs;
} Call;

static PyTypeObject CallType;

/* One is used at a time as a rule: its memory is kept for the next. */
static Call *spare_call = NULL;

static int
call_traverse(PyObject *op, visitproc visit, void *arg)
{
    Call *self = (Call *)op;
    Py_VISIT(self->function);
    Py_VISIT(self->queue);
    Py_VISIT(self->item);
    Py_VISIT(self->inner);
    Py_VISIT(self->given);
    Py_VISIT(self->error);
    return 0;
}

static int
call_clear(PyObject *op)
{
    Call *self = (Call *)op;
    Py_CLEAR(self->queue);
    Py_CLEAR(self->item);
    Py_CLEAR(self->inner);
    Py_CLEAR(self->given);
    Py_CLEAR(self->error);
    Py_CLEAR(self->function);
    return 0;
}

/* A coroutine that was never awaited: the warning that Python gives for its own. */
static void
call_finalize(PyObject *op)
{
    Call *self = (Call *)op;
    if (self->queue == NULL || self->function == NULL) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *name = PyObject_GetAttrString(self->function, "__qualname__");
    if (name == NULL || PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine '%S' was never awaited", name) < 0) {
        PyErr_WriteUnraisable(op);
    }
    Py_XDECREF(name);
    PyErr_Restore(type, value, traceback);
}

static void
call_dealloc(PyObject *op)
{
    Call *self = (Call *)op;
    if (self->queue != NULL && PyObject_CallFinalizerFromDealloc(op) < 0) {
        return; /* somebody keeps it after all */
    }
    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    call_clear(op);
    if (spare_call == NULL) {
        spare_call = self;
    }
    else {
        PyObject_GC_Del(op);
    }
}

static Call *
call_new(void)
{
    Call *self = spare_call;
    if (self != NULL) {
        spare_call = NULL;
        (void)PyObject_Init((PyObject *)self, &CallType);
    }
    else {
        self = PyObject_GC_New(Call, &CallType);
        if (self == NULL) {
            return NULL;
        }
    }
    self->function = self->queue = self->item = self->inner = self->given = self->error = self->weakrefs = NULL;
    return self;
}

static PyObject *
call_make(PyObject *function, PyObject *queue, PyObject *item)
{
    Call *self = call_new();
    if (self != NULL) {
        self->function = Py_NewRef(function);
        self->queue = Py_NewRef(queue);
        self->item = Py_NewRef(item);
        PyObject_GC_Track(self);
    }
    return (PyObject *)self;
}

/* What goes on with a handler's coroutine after its first step, which has yielded `given`, or raised the exception that
 * is set. The references are given to it. */
static PyObject *
call_begun(PyObject *coroutine, PyObject *given)
{
    PyObject *error = NULL;
    if (given == NULL) {
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL) {
            PyException_SetTraceback(error, traceback);
        }
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        Py_CLEAR(coroutine);
    }
    Call *self = call_new();
    if (self == NULL) {
        Py_XDECREF(coroutine);
        Py_XDECREF(given);
        Py_XDECREF(error);
        return NULL;
    }
    self->inner = coroutine;
    self->given = given;
    self->error = error;
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

/* Begin the Python's coroutine, for what the hot path does not take; with a route that was asked for, its second half. The
 * item and the queue are its own then. */
static int
call_hand_over(Call *self, PyObject *queue, PyObject *item, PyObject *asked)
{
    PyObject *inner;
    if (asked != NULL) {
        inner = PyObject_CallMethodObjArgs(queue, name_wait_at, asked, item, NULL);
    }
    else {
        PyObject *function = Py_NewRef(self->function);
        PyObject *arguments[] = {queue, item};
        inner = PyObject_Vectorcall(function, arguments, 2, NULL);
        Py_DECREF(function);
    }
    if (inner == NULL) {
        return -1;
    }
    Py_XSETREF(self->inner, inner);
    return 0;
}

/* What a coroutine makes of a StopIteration that leaves it, which whoever awaits it would take for its result. */
static void
no_stop_iteration(void)
{
    if (PyErr_ExceptionMatches(PyExc_StopIteration)) {
        PyObject *type, *stop, *traceback;
        PyErr_Fetch(&type, &stop, &traceback);
        PyErr_NormalizeException(&type, &stop, &traceback);
        if (traceback != NULL) {
            PyException_SetTraceback(stop, traceback);
        }
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        PyErr_SetString(PyExc_RuntimeError, "coroutine raised StopIteration");
        PyObject *error;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        PyException_SetCause(error, Py_NewRef(stop));
        PyException_SetContext(error, stop);
        PyErr_Restore(type, error, traceback);
    }
}

/* One step of the coroutine, whatever ends it. */
static PySendResult
call_step(Call *self, PyObject *value, PyObject **result)
{
    *result = NULL;
    if (self->given != NULL) {
        *result = self->given;
        self->given = NULL;
        return PYGEN_NEXT;
    }
    if (self->error != NULL) {
        PyObject *error = self->error;
        self->error = NULL;
        PyErr_Restore(Py_NewRef(Py_TYPE(error)), error, PyException_GetTraceback(error));
        return PYGEN_ERROR;
    }
    if (self->inner == NULL) {
        if (self->queue == NULL) {
            PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
            return PYGEN_ERROR;
        }
        if (value != Py_None) {
            PyErr_SetString(PyExc_TypeError, "can't send non-None value to a just-started coroutine");
            return PYGEN_ERROR;
        }
        PyObject *queue = self->queue, *item = self->item;
        self->queue = self->item = NULL;
        PyObject *asked;
        int put = entrance_put(queue, item, &asked);
        if (put == 0 && call_hand_over(self, queue, item, asked) < 0) {
            put = -1;
        }
        Py_XDECREF(asked);
        Py_DECREF(queue);
        Py_XDECREF(item);
        if (put > 0) {
            *result = Py_NewRef(Py_True);
            return PYGEN_RETURN;
        }
        if (put < 0) {
            return PYGEN_ERROR;
        }
    }
    PyObject *inner = self->inner;
    if (inner == NULL) { /* let go of by a finalizer, just now */
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return PYGEN_ERROR;
    }
    Py_INCREF(inner);
    PySendResult outcome = PyIter_Send(inner, value, result);
    if (outcome != PYGEN_NEXT && self->inner == inner) {
        Py_CLEAR(self->inner);
    }
    Py_DECREF(inner);
    return outcome;
}

/* coroutine.send(value) */
static PySendResult
call_send_value(PyObject *op, PyObject *value, PyObject **result)
{
    PySendResult outcome = call_step((Call *)op, value, result);
    if (outcome == PYGEN_ERROR) {
        no_stop_iteration();
    }
    return outcome;
}

/* An outcome as `send` and `next` give it: a value, or an exception, which is StopIteration for a result. */
static PyObject *
call_outcome(PySendResult outcome, PyObject *result)
{
    if (outcome == PYGEN_NEXT) {
        return result;
    }
    if (outcome == PYGEN_RETURN) {
        PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
        Py_DECREF(result);
        if (stop != NULL) {
            PyErr_SetObject(PyExc_StopIteration, stop);
            Py_DECREF(stop);
        }
    }
    return NULL;
}

static PyObject *
call_send(PyObject *op, PyObject *value)
{
    PyObject *result;
    PySendResult outcome = call_send_value(op, value, &result);
    return call_outcome(outcome, result);
}

static PyObject *
call_next(PyObject *op)
{
    return call_send(op, Py_None);
}

/* coroutine.throw(...): into the Python's coroutine, which is made now if nothing has begun, so that it ends by it. */
static PyObject *
call_throw(PyObject *op, PyObject *args)
{
    Call *self = (Call *)op;
    if (self->inner == NULL) {
        if (self->queue == NULL) {
            PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
            return NULL;
        }
        PyObject *queue = self->queue, *item = self->item;
        self->queue = self->item = NULL;
        int made = call_hand_over(self, queue, item, NULL);
        Py_DECREF(queue);
        Py_XDECREF(item);
        if (made < 0) {
            return NULL;
        }
    }
    PyObject *inner = Py_XNewRef(self->inner);
    if (inner == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return NULL;
    }
    PyObject *method = PyObject_GetAttrString(inner, "throw");
    PyObject *result = method == NULL ? NULL : PyObject_Call(method, args, NULL);
    Py_XDECREF(method);
    if (result == NULL && self->inner == inner) {
        /* It raised, so it is over; unless it runs just now, and refused. */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *frame = PyObject_GetAttrString(inner, "cr_frame");
        if (frame == NULL) {
            PyErr_Clear();
        }
        if ((frame == NULL || frame == Py_None) && self->inner == inner) {
            Py_CLEAR(self->inner);
        }
        Py_XDECREF(frame);
        PyErr_Restore(type, value, traceback);
    }
    Py_DECREF(inner);
    return result;
}

/* coroutine.close() */
static PyObject *
call_close(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    Call *self = (Call *)op;
    if (self->inner == NULL) {
        Py_CLEAR(self->queue);
        Py_CLEAR(self->item);
        Py_RETURN_NONE;
    }
    PyObject *inner = Py_NewRef(self->inner);
    PyObject *result = PyObject_CallMethod(inner, "close", NULL);
    if (result != NULL && self->inner == inner) {
        Py_CLEAR(self->inner);
    }
    Py_DECREF(inner);
    return result;
}

/* coroutine.__await__() */
static PyObject *
call_await(PyObject *op)
{
    if (((Call *)op)->inner != NULL && ((Call *)op)->given == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "coroutine is being awaited already");
        return NULL;
    }
    return Py_NewRef(op);
}

/* What is asked of a coroutine by those who look into it: of the Python's, once there is one. */
static PyObject *
call_get_inner(PyObject *op, void *name)
{
    PyObject *inner = ((Call *)op)->inner;
    if (inner == NULL) {
        Py_RETURN_NONE;
    }
    Py_INCREF(inner);
    PyObject *found = PyObject_GetAttrString(inner, (const char *)name);
    Py_DECREF(inner);
    return found;
}

static PyObject *
call_get_inner_flag(PyObject *op, void *name)
{
    if (((Call *)op)->inner == NULL) {
        Py_RETURN_FALSE;
    }
    return call_get_inner(op, name);
}

#if PY_VERSION_HEX >= 0x030F0000
/* What `inspect.getcoroutinestate` asks for. */
static PyObject *
call_get_state(PyObject *op, void *name)
{
    Call *self = (Call *)op;
    return self->inner != NULL ? call_get_inner(op, name)
                               : PyUnicode_FromString(self->queue != NULL ? "CORO_CREATED" : "CORO_CLOSED");
}
#endif

static PyObject *
call_get_name(PyObject *op, void *name)
{
    PyObject *function = ((Call *)op)->function;
    if (function == NULL) {
        Py_RETURN_NONE;
    }
    return PyObject_GetAttrString(function, (const char *)name);
}

static PyObject *
call_repr(PyObject *op)
{
    PyObject *name = call_get_name(op, "__qualname__");
    if (name == NULL) {
        return NULL;
    }
    PyObject *text = PyUnicode_FromFormat("<coroutine object %S at %p>", name, op);
    Py_DECREF(name);
    return text;
}

static PyMethodDef call_methods[] = {
    {"send", call_send, METH_O, "As of any coroutine."},
    {"throw", call_throw, METH_VARARGS, "As of any coroutine."},
    {"close", call_close, METH_NOARGS, "As of any coroutine."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef call_getset[] = {
    {"__name__", call_get_name, NULL, NULL, "__name__"},
    {"__qualname__", call_get_name, NULL, NULL, "__qualname__"},
    {"cr_code", call_get_name, NULL, NULL, "__code__"},
    {"cr_await", call_get_inner, NULL, NULL, "cr_await"},
    {"cr_frame", call_get_inner, NULL, NULL, "cr_frame"},
    {"cr_origin", call_get_inner, NULL, NULL, "cr_origin"},
#if PY_VERSION_HEX >= 0x030F0000
    {"cr_state", call_get_state, NULL, NULL, "cr_state"},
#endif
    {"cr_running", call_get_inner_flag, NULL, NULL, "cr_running"},
    {"cr_suspended", call_get_inner_flag, NULL, NULL, "cr_suspended"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyAsyncMethods call_as_async = {
    .am_await = call_await,
    .am_send = call_send_value,
};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batchqueue_async._native.hotpath.Call",
    .tp_doc = "A coroutine of produce.",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = call_dealloc,
    .tp_traverse = call_traverse,
    .tp_clear = call_clear,
    .tp_finalize = call_finalize,
    .tp_weaklistoffset = offsetof(Call, weakrefs),
    .tp_as_async = &call_as_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = call_next,
    .tp_repr = call_repr,
    .tp_methods = call_methods,
    .tp_getset = call_getset,
};

/* -- Method: a method whose usual case is compiled, around the Python that it stands for --------------------------- */

/* What a method does with one argument: a new reference; NULL without an error for the Python, with one for an error. */
typedef PyObject *(*HotStep)(PyObject *function, PyObject *self, PyObject *argument);

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function;
    PyTypeObject *owner; /* one of the static types of this file */
    HotStep step;
} Method;

static PyTypeObject MethodType;

/* BatchQueue.produce_nowait */
static PyObject *
step_produce_nowait(PyObject *Py_UNUSED(function), PyObject *queue, PyObject *item)
{
    PyObject *asked, *result = NULL;
    if (entrance_put(queue, item, &asked) > 0) {
        result = Py_NewRef(Py_True);
    }
    else if (asked != NULL) {
        result = PyObject_CallMethodObjArgs(queue, name_put_at, asked, item, NULL);
        Py_DECREF(asked);
    }
    return result;
}

/* BatchQueue.produce: nothing happens before it is awaited. */
static PyObject *
step_produce(PyObject *function, PyObject *queue, PyObject *item)
{
    return call_make(function, queue, item);
}

static const struct {
    const char *name;
    PyTypeObject *owner;
    HotStep step;
} hot_steps[] = {
    {"produce_nowait", &EntranceType, step_produce_nowait},
    {"produce", &EntranceType, step_produce},
    {"on_ready", &DrainFieldsType, step_on_ready},
    {"thread_produce", &DoorType, step_thread_produce},
    {"thread_produce_many", &DoorType, step_thread_produce_many},
    {NULL, NULL, NULL},
};

/* The call of a method: the compiled step for `self` and one argument, else the Python, with whatever it was given. */
static PyObject *
method_vectorcall(PyObject *op, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Method *self = (Method *)op;
    if (PyVectorcall_NARGS(nargsf) == 2 && kwnames == NULL && is_kind(args[0], self->owner)) {
        PyObject *result = self->step(self->function, args[0], args[1]);
        if (result != NULL || PyErr_Occurred()) {
            return result;
        }
    }
    return PyObject_Vectorcall(self->function, args, nargsf, kwnames);
}

static PyObject *
method_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *function;
    const char *name;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Method() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!s:Method", &PyFunction_Type, &function, &name)) {
        return NULL;
    }
    for (int index = 0; hot_steps[index].name != NULL; index++) {
        if (strcmp(name, hot_steps[index].name) == 0) {
            Method *self = (Method *)type->tp_alloc(type, 0);
            if (self != NULL) {
                self->vectorcall = method_vectorcall;
                self->function = Py_NewRef(function);
                self->owner = hot_steps[index].owner;
                self->step = hot_steps[index].step;
                if (self->step == step_on_ready) {
                    Py_XSETREF(on_ready_method, Py_NewRef((PyObject *)self));
                }
            }
            return (PyObject *)self;
        }
    }
    PyErr_Format(PyExc_ValueError, "there is no compiled step %s", name);
    return NULL;
}

static int
method_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(((Method *)op)->function);
    return 0;
}

/* There is no tp_clear: as with a tuple, a cycle through it is broken elsewhere, in the function or the class, and so
 * `function` is never NULL. */
static void
method_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    Py_XDECREF(((Method *)op)->function);
    Py_TYPE(op)->tp_free(op);
}

/* queue.produce: bound, as a function would be. */
static PyObject *
method_descr_get(PyObject *op, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    if (instance == NULL || instance == Py_None) {
        return Py_NewRef(op);
    }
    return PyMethod_New(op, instance);
}

/* Its name, signature, code and documentation are those of the Python, so that `inspect` sees what it stands for. */
static PyObject *
method_getattro(PyObject *op, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(op, name);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        found = PyObject_GetAttr(((Method *)op)->function, name);
    }
    return found;
}

static PyObject *
method_get(PyObject *op, void *name)
{
    return PyObject_GetAttrString(((Method *)op)->function, (const char *)name);
}

static PyObject *
method_repr(PyObject *op)
{
    return PyUnicode_FromFormat("<compiled %R>", ((Method *)op)->function);
}

static PyMemberDef method_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Method, function), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef method_getset[] = {
    {"__doc__", method_get, NULL, NULL, "__doc__"},
    {"__module__", method_get, NULL, NULL, "__module__"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject MethodType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batchqueue_async._native.hotpath.Method",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = method_new,
    .tp_dealloc = method_dealloc,
    .tp_traverse = method_traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Method, vectorcall),
    .tp_descr_get = method_descr_get,
    .tp_getattro = method_getattro,
    .tp_repr = method_repr,
    .tp_members = method_members,
    .tp_getset = method_getset,
};

/* -- many items --------------------------------------------------------------------------------------------------- */

/* The arguments of `step(by_type, items, start)`, checked; 0 if the Python has to do it. */
static int
bulk_arguments(PyObject *const *args, Py_ssize_t count, Py_ssize_t *start)
{
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "by_type, items and start are wanted, not %zd arguments", count);
        return -1;
    }
    *start = PyLong_AsSsize_t(args[2]);
    if (*start == -1 && PyErr_Occurred()) {
        return -1;
    }
    return *start >= 0 && is_by_type(args[0]) && (PyList_CheckExact(args[1]) || PyTuple_CheckExact(args[1]));
}

/* What is done with an item that has been looked up: 1, or 0 for the Python, or -1. `sure` is a class that is known to be
 * of the right kind, as long as nobody's code runs; or NULL. */
typedef int (*BulkStep)(PyObject *found, PyObject *item, PyTypeObject **sure);

/* So many items are looked at together. */
#define BLOCK 16

/* Look up the types of the next items, at most a block of them: how many. What is known of each goes into `known`, as a
 * borrowed reference, or NULL. Nobody's code runs.
 *
 * An item, the line of the table that its type is in, and what stands there are each a step to memory that is rarely in
 * the cache: a block of items takes each step together, and asks for what the next one needs. */
static Py_ssize_t
know_block(TypeTable *table, PyObject *const *items, Py_ssize_t left, PyObject **known)
{
    const TablePlace *lines[BLOCK];
    Py_ssize_t count = left < BLOCK ? left : BLOCK;
    Py_ssize_t more = left < 2 * BLOCK ? left : 2 * BLOCK;
    for (Py_ssize_t at = count; at < more; at++) {
        PREFETCH(items[at]);
    }
    const TablePlace *places = table->places;
    const Py_ssize_t count_of_lines = table->lines;
    for (Py_ssize_t at = 0; at < count; at++) {
        lines[at] = line_of(places, count_of_lines, Py_TYPE(items[at]));
        PREFETCH(lines[at]);
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        known[at] = line_known(lines[at], Py_TYPE(items[at]));
        PREFETCH(known[at]);
    }
    return count;
}

/* Put the items of a list or tuple, from `index` up to `size`, where the table says, up to the first that it does not
 * know, or that `quick` does not take: its index. Nobody's code runs. Where a list of items is also one that items go into,
 * it grows meanwhile and its memory may move: so it is read anew for each. */
static ALWAYS_INLINE Py_ssize_t
bulk_known(TypeTable *table, PyObject *items, Py_ssize_t index, Py_ssize_t size, BulkStep quick)
{
    PyObject *known[BLOCK];
    PyTypeObject *sure = NULL;
    while (index < size) {
        Py_ssize_t count = know_block(table, &PySequence_Fast_ITEMS(items)[index], size - index, known);
        for (Py_ssize_t at = 0; at < count; at++, index++) {
            if (known[at] == NULL || quick(known[at], PySequence_Fast_GET_ITEM(items, index), &sure) <= 0) {
                return index;
            }
        }
    }
    return index;
}

/* Items from `start` on, each by what is found for its type, up to the first that is for the Python: its index.
 *
 * `quick` runs nobody's code. Where it does not do, the type is looked up in the dict and `step` makes the step, both of
 * which may run code of the user's: the item and what was found are held meanwhile, and everything is read anew. */
static ALWAYS_INLINE PyObject *
bulk_by_type(PyObject *const *args, Py_ssize_t count, BulkStep quick, BulkStep step)
{
    Py_ssize_t index;
    int usual = bulk_arguments(args, count, &index);
    if (usual <= 0) {
        return usual < 0 ? NULL : Py_NewRef(args[2]);
    }
    PyObject *by_type = args[0], *items = args[1];
    const Py_ssize_t end = PySequence_Fast_GET_SIZE(items); /* what a list gets meanwhile is not asked for */
    int is_table = Py_IS_TYPE(by_type, &TypeTableType), done = 1;
    while (done > 0) {
        Py_ssize_t size = PySequence_Fast_GET_SIZE(items) < end ? PySequence_Fast_GET_SIZE(items) : end;
        if (is_table && ((TypeTable *)by_type)->lines != 0) {
            index = bulk_known((TypeTable *)by_type, items, index, size, quick);
        }
        if (index >= size) {
            break;
        }
        if (PyErr_Occurred()) {
            return NULL; /* no memory for it */
        }
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, index));
        PyObject *found = look_up(by_type, Py_TYPE(item));
        if (found != NULL) {
            PyTypeObject *sure = NULL;
            done = step(found, item, &sure);
            Py_DECREF(found);
        }
        else if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_KeyError)) {
            done = -1;
        }
        else {
            PyErr_Clear();
            done = 0;
        }
        Py_DECREF(item);
        index += done > 0;
    }
    return done < 0 ? NULL : PyLong_FromSsize_t(index);
}

/* The loop of Intake.put_what_fits, up to the first item that finds no fast slot. */
static PyObject *
put_run(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    return bulk_by_type(args, count, place_put, route_put);
}

static inline int
list_put(PyObject *list, PyObject *item, PyTypeObject **Py_UNUSED(sure))
{
    if (!PyList_CheckExact(list)) {
        return 0;
    }
    return list_append(list, item, 0) < 0 ? -1 : 1;
}

/* Partition.offer_many(items, into), with the partition or the lane as the first argument: whether all are in. */
static PyObject *
put_together(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "a place and items are wanted");
        return NULL;
    }
    int put = 0;
    if (PyList_CheckExact(args[1]) || PyTuple_CheckExact(args[1])) {
        put = place_put_many(args[0], args[1]);
        put = put != 0 ? put : put_first(args[0], NULL, args[1]);
    }
    return put < 0 ? NULL : PyBool_FromLong(put);
}

/* The loop of Dispatcher._sort, up to the first item of a type that is not in `by_type`. */
static PyObject *
sort_run(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    return bulk_by_type(args, count, list_put, list_put);
}

static Py_ssize_t
thread_put_run(PyObject *by_type, PyObject *batch)
{
    TypeTable *table = (TypeTable *)by_type;
    return table->lines == 0 ? 0 : bulk_known(table, batch, 0, PyList_GET_SIZE(batch), share_put);
}

/* ThreadInbox._put_runs, under its lock, up to the first item whose type is not met or has no place. */
static PyObject *
put_credits(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    return bulk_by_type(args, count, share_put, share_put);
}

/* Let items, in their order, go from a list into the lanes of a partition that holds places for them, up to the first whose
 * type is not known, or has no lane there that is awake: the rest stays in the list. Nobody's code runs, and no reference
 * is counted: each moves from list to list. */
static void
move_known(TypeTable *table, PartitionFields *partition, PyObject *list)
{
    PyObject *known[BLOCK];
    PyTypeObject *sure = NULL;
    PyObject **items = ((PyListObject *)list)->ob_item;
    Py_ssize_t size = PyList_GET_SIZE(list), index = 0;
    int usual = table->lines != 0 && size > 0; /* an empty list has no memory */
    while (usual && index < size) {
        Py_ssize_t count = know_block(table, &items[index], size - index, known);
        for (Py_ssize_t at = 0; usual && at < count; at++) {
            LaneFields *lane = (LaneFields *)known[at];
            usual = lane != NULL && is_kind_again((PyObject *)lane, &LaneFieldsType, &sure) && !lane->asleep
                    && lane->partition == (PyObject *)partition && lane->place.tail != NULL && lane->place.tail != list
                    && PyList_CheckExact(lane->place.tail)
                    && list_append(lane->place.tail, items[index], lane->place.batch) == 0;
            if (usual) {
                Py_DECREF(items[index]); /* not its last reference: the lane has it now */
                index++;
            }
        }
    }
    if (index == 0) {
        return;
    }
    partition->held -= index;
    partition->in_lanes += index;
    memmove(items, &items[index], (size_t)(size - index) * sizeof(PyObject *));
    Py_SET_SIZE(list, size - index);
}

/* Partition.adopt(Intake._by_lane(items)), up to the first item whose type has no lane in the partition that is awake: the
 * items that have gone into their lanes are in the list no more. */
static PyObject *
put_held(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "by_type, a partition and items are wanted");
        return NULL;
    }
    PyObject *by_type = args[0], *partition = args[1], *list = args[2];
    if (!Py_IS_TYPE(by_type, &TypeTableType) || !is_kind(partition, &PartitionFieldsType) || !PyList_CheckExact(list)) {
        Py_RETURN_NONE;
    }
    PyObject *before = NULL; /* only compared: the type that was looked up last */
    while (((PartitionFields *)partition)->lanes != NULL && PyDict_CheckExact(((PartitionFields *)partition)->lanes)) {
        move_known((TypeTable *)by_type, (PartitionFields *)partition, list);
        if (PyErr_Occurred() || PyList_GET_SIZE(list) == 0) {
            PyErr_Clear(); /* for want of memory: these items are accepted, and the Python hands their list over whole */
            break;
        }
        PyTypeObject *kind = (PyTypeObject *)Py_NewRef(Py_TYPE(PyList_GET_ITEM(list, 0)));
        PyObject *found = (PyObject *)kind == before ? NULL : look_up(by_type, kind); /* the table may know it now */
        before = (PyObject *)kind;
        Py_DECREF(kind);
        Py_XDECREF(found);
        if (found == NULL) {
            PyErr_Clear(); /* a comparison's: the Python meets it again */
            break;
        }
    }
    Py_RETURN_NONE;
}

/* The lists of Intake._by_lane: the items of each type, in their order; the list itself if there is but one type. None
 * if a type is not hashed by its identity, and for what is not a list. Without such types it runs no code of the
 * user's. */
static PyObject *
group_by_type(PyObject *Py_UNUSED(module), PyObject *items)
{
    if (!PyList_CheckExact(items)) {
        Py_RETURN_NONE;
    }
    PyObject *lists = PyDict_New();
    if (lists == NULL) {
        return NULL;
    }
    PyTypeObject *kind = NULL; /* an item of the list keeps it */
    PyObject *mine = NULL;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(items); index++) {
        PyObject *item = PyList_GET_ITEM(items, index);
        if (Py_TYPE(item) != kind) {
            kind = Py_TYPE(item);
            if (!is_plain(kind)) {
                Py_DECREF(lists);
                Py_RETURN_NONE;
            }
            mine = PyDict_GetItemWithError(lists, (PyObject *)kind);
            if (mine == NULL) {
                if (PyErr_Occurred() || (mine = PyList_New(0)) == NULL) {
                    Py_DECREF(lists);
                    return NULL;
                }
                int stored = PyDict_SetItem(lists, (PyObject *)kind, mine);
                Py_DECREF(mine);
                if (stored < 0) {
                    Py_DECREF(lists);
                    return NULL;
                }
            }
        }
        if (list_append(mine, item, 0) < 0) {
            Py_DECREF(lists);
            return NULL;
        }
    }
    PyObject *values = PyDict_Values(lists);
    if (values != NULL && PyList_GET_SIZE(values) == 1) {
        if (PyList_SetItem(values, 0, Py_NewRef(items)) < 0) {
            Py_CLEAR(values);
        }
    }
    Py_DECREF(lists);
    return values;
}

/* Offer.route_by for by_key(): the indexes that the keys of the items from `start` on give, of `width` partitions. */
static PyObject *
key_indexes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !(PyList_CheckExact(args[1]) || PyTuple_CheckExact(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "a key function, items, start and width are wanted");
        return NULL;
    }
    PyObject *items = args[1], *indexes = PyList_New(0);
    Py_ssize_t start = PyLong_AsSsize_t(args[2]), width = PyLong_AsSsize_t(args[3]);
    int sound = indexes != NULL && !PyErr_Occurred();
    if (sound && (width <= 0 || start < 0)) {
        PyErr_SetString(PyExc_ValueError, "the start is below 0, or there are no partitions");
        sound = 0;
    }
    for (Py_ssize_t at = start; sound && at < PySequence_Fast_GET_SIZE(items); at++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, at));
        Py_ssize_t index = index_by_key(args[0], item, width);
        PyObject *number = index < 0 ? NULL : PyLong_FromSsize_t(index);
        sound = number != NULL && PyList_Append(indexes, number) == 0;
        Py_XDECREF(number);
        Py_DECREF(item);
    }
    if (!sound) {
        Py_CLEAR(indexes);
    }
    return indexes;
}

/* ThreadInbox._put_runs for items whose partitions were asked for, under its lock, from an index on: the index of the first
 * that has no place. Nobody's code runs. */
static PyObject *
put_indexed(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyList_CheckExact(args[0]) || !(PyList_CheckExact(args[1]) || PyTuple_CheckExact(args[1]))
        || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "shares, items, their indexes and start are wanted");
        return NULL;
    }
    PyObject *shares = args[0], *items = args[1], *indexes = args[2];
    Py_ssize_t at = PyLong_AsSsize_t(args[3]);
    if (at < 0) {
        return PyErr_Occurred() ? NULL : Py_NewRef(args[3]);
    }
    PyTypeObject *sure = NULL;
    Py_ssize_t most = PySequence_Fast_GET_SIZE(items);
    most = most < PyList_GET_SIZE(indexes) ? most : PyList_GET_SIZE(indexes);
    for (; at < most; at++) {
        PyObject *number = PyList_GET_ITEM(indexes, at);
        Py_ssize_t index = PyLong_CheckExact(number) ? PyLong_AsSsize_t(number) : -1;
        int put = index < 0 || index >= PyList_GET_SIZE(shares)
                      ? 0
                      : share_put(PyList_GET_ITEM(shares, index), PySequence_Fast_GET_ITEM(items, at), &sure);
        if (put <= 0) {
            PyErr_Clear(); /* for want of memory, say: the Python meets it again */
            break;
        }
    }
    return PyLong_FromSsize_t(at);
}

/* Take a list as one of the parts: (partition, list). */
static int
add_part(PyObject *parts, PyObject *partition, PyObject *list)
{
    PyObject *part = PyTuple_Pack(2, partition, list);
    int added = part == NULL ? -1 : PyList_Append(parts, part);
    Py_XDECREF(part);
    return added;
}

/* The loop of Intake._put_all_by_route(items), for by_key(): the partition of each item, and (partition, its items) for
 * each partition that has any; None where the Python has to ask anew. */
static PyObject *
key_parts(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "a router and items are wanted");
        return NULL;
    }
    RouterFields *router = (RouterFields *)args[0];
    PyObject *items = args[1];
    if (!is_kind(args[0], &RouterFieldsType) || router->key == NULL || router->key == Py_None || router->width <= 0
        || !(PyList_CheckExact(items) || PyTuple_CheckExact(items))) {
        Py_RETURN_NONE;
    }
    Py_ssize_t width = router->width, met = 0;
    PyObject **lists = PyMem_Calloc((size_t)width, sizeof(PyObject *));
    Py_ssize_t *order = PyMem_Calloc((size_t)width, sizeof(Py_ssize_t)); /* of the partitions, as they were met */
    PyObject *key = Py_NewRef(router->key), *routes = PyList_New(0), *parts = PyList_New(0), *result = NULL;
    int usual = lists != NULL && order != NULL && routes != NULL && parts != NULL;
    for (Py_ssize_t at = 0; usual && at < PySequence_Fast_GET_SIZE(items); at++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, at));
        Py_ssize_t index = index_by_key(key, item, width);
        PyObject *route = index < 0 || router->width != width ? NULL : router_place(router, index);
        if (route != NULL && lists[index] == NULL) {
            lists[index] = PyList_New(0);
            order[met++] = index;
        }
        usual = route != NULL && lists[index] != NULL && list_append(routes, route, PySequence_Fast_GET_SIZE(items)) == 0
                && list_append(lists[index], item, 0) == 0;
        Py_XDECREF(route);
        Py_DECREF(item);
    }
    for (Py_ssize_t at = 0; usual && at < met; at++) {
        PyObject *route = router->width != width ? NULL : router_place(router, order[at]);
        usual = route != NULL && add_part(parts, route, lists[order[at]]) == 0;
        Py_XDECREF(route);
    }
    if (usual) {
        result = PyTuple_Pack(2, routes, parts);
    }
    else if (!PyErr_Occurred()) {
        result = Py_NewRef(Py_None);
    }
    for (Py_ssize_t at = 0; lists != NULL && at < width; at++) {
        Py_XDECREF(lists[at]);
    }
    PyMem_Free(lists);
    PyMem_Free(order);
    Py_XDECREF(parts);
    Py_XDECREF(routes);
    Py_DECREF(key);
    if (result == NULL && !PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    return result;
}

/* Whether the items are of one type: countOf(map(type, items), type(items[0])) == len(items). */
static PyObject *
one_type(PyObject *Py_UNUSED(module), PyObject *items)
{
    PyObject *whole = PySequence_Fast(items, "a sequence is wanted");
    if (whole == NULL) {
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(whole);
    PyObject **each = PySequence_Fast_ITEMS(whole);
    int same = 1;
    for (Py_ssize_t index = 1; index < count; index++) {
        if (Py_TYPE(each[index]) != Py_TYPE(each[0])) {
            same = 0;
            break;
        }
    }
    Py_DECREF(whole);
    return PyBool_FromLong(same);
}

/* -- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef module_methods[] = {
    {"put_run", (PyCFunction)(void (*)(void))put_run, METH_FASTCALL,
     "Put items into the fast slots of their types, from an index on; the index of the first that has none."},
    {"put_together", (PyCFunction)(void (*)(void))put_together, METH_FASTCALL,
     "Put items into free places of a partition or a lane, all or none: whether they are in."},
    {"sort_run", (PyCFunction)(void (*)(void))sort_run, METH_FASTCALL,
     "Append items to the lists of their types, from an index on; the index of the first whose type has none."},
    {"put_credits", (PyCFunction)(void (*)(void))put_credits, METH_FASTCALL,
     "Put items into the places of their types' shares, from an index on; the index of the first that has none."},
    {"put_held", (PyCFunction)(void (*)(void))put_held, METH_FASTCALL,
     "Let items go from a list into the lanes of their types, up to the first that has none awake."},
    {"key_indexes", (PyCFunction)(void (*)(void))key_indexes, METH_FASTCALL,
     "The indexes that the keys of items give, from one of them on."},
    {"put_indexed", (PyCFunction)(void (*)(void))put_indexed, METH_FASTCALL,
     "Put items into the shares of their indexes, from an index on; the index of the first that has no place."},
    {"key_parts", (PyCFunction)(void (*)(void))key_parts, METH_FASTCALL,
     "The partition of each item by its key, and the items of each partition; None where the Python has to look."},
    {"group_by_type", group_by_type, METH_O, "The items of each type; None where the Python has to look."},
    {"one_type", one_type, METH_O, "Whether all items are of one type."},
    {"take_usual", (PyCFunction)(void (*)(void))take_usual, METH_FASTCALL,
     "Take partitions whole, up to the first that is not usual: how many are left, items taken, the oldest's time."},
    {"finish_usual", finish_usual, METH_O, "Let partitions be finished, up to the first that is not usual."},
    {"group_usual", (PyCFunction)(void (*)(void))group_usual, METH_FASTCALL,
     "The calls for chunks that are each of a type of its own; None where the Python has to look."},
    {"call_usual", (PyCFunction)(void (*)(void))call_usual, METH_FASTCALL,
     "Make the calls of a round, up to the first that waits or raises."},
    {NULL, NULL, 0, NULL},
};

/* What the functions use by name, once for the process. */
static int
make_names(void)
{
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {{&name_append, "append"}, {&name_popleft, "popleft"}, {&name_lingers, "lingers"},
                 {&name_leave, "leave"},   {&name_record, "record"},   {&name_put_at, "_put_at"},
                 {&name_wait_at, "_wait_at"}, {&name_refill, "refill"}};
    for (size_t index = 0; index < Py_ARRAY_LENGTH(names); index++) {
        if (*names[index].name == NULL && (*names[index].name = PyUnicode_InternFromString(names[index].text)) == NULL) {
            return -1;
        }
    }
    if (deque_type == NULL) {
        PyObject *collections = PyImport_ImportModule("collections");
        PyObject *found = collections == NULL ? NULL : PyObject_GetAttrString(collections, "deque");
        Py_XDECREF(collections);
        if (found == NULL || !PyType_Check(found)) {
            Py_XDECREF(found);
            return -1;
        }
        deque_type = (PyTypeObject *)found;
    }
    if (no_slots == NULL) {
        no_slots = PyObject_New(Countdown, &CountdownType);
        if (no_slots != NULL) {
            no_slots->left = 0;
        }
    }
    if (no_call == NULL) {
        no_call = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    }
    return no_slots == NULL || no_call == NULL ? -1 : 0;
}

static int
module_exec(PyObject *module)
{
    PyTypeObject *types[] = {&TypeTableType,     &CountdownType,     &TurnsType,         &RouterFieldsType,  &PlaceType,         &PartitionFieldsType, &LaneFieldsType,
                             &DrainFieldsType,   &RoundFieldsType,   &HandlerFieldsType,   &TurnFieldsType,
                             &CounterFieldsType, &SizeFieldsType,    &EntranceType,      &InboxLockType,       &ShareType,
                             &InboxType,         &DoorType,          &CallType,            &MethodType};
    PartitionFieldsType.tp_base = LaneFieldsType.tp_base = &PlaceType;
    TypeTableType.tp_base = &PyDict_Type;
    for (size_t index = 0; index < Py_ARRAY_LENGTH(types); index++) {
        if (PyModule_AddType(module, types[index]) < 0) {
            return -1;
        }
    }
    if (make_names() < 0 || PyModule_AddObjectRef(module, "NO_SLOTS", (PyObject *)no_slots) < 0
        || PyModule_AddObjectRef(module, "NO_CALL", no_call) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "API", API);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    /* Its types are static, and so is the spare call: an interpreter with a lock of its own runs the Python. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "batchqueue_async._native.hotpath",
    .m_doc = "The hot path of queue and bridge, compiled.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit_hotpath(void)
{
    return PyModuleDef_Init(&module_definition);
}
