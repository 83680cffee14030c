/* The hot path of queue and bridge, compiled: what an item costs each time, and nothing else.
 *
 * Each function here stands for a few lines of Python, which its comment names. The Python stays the reference and the
 * fallback: a function takes the usual case, whole, and leaves everything else to the Python of the same name, before
 * it has changed anything. So no error message, no wait and no rule exists twice.
 *
 * What keeps it safe:
 *
 * - Between its last look and its last step a function runs no code of the user's: no hash, no comparison, no
 *   finalizer. A type is looked up only if its metaclass has the hash and the comparison of `type`; a key function is
 *   asked before the last look.
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

#include "bridge.h"

/* -- Call: what `await queue.produce(item)` awaits ---------------------------------------------------------------- */

#include "call.h"

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

#include "bulk.h"

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
