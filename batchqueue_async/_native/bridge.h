/* The bridge's half of the hot path: the lock of a queue's inbox, and what threads put into its shares. Included once, by
 * hotpath.c.
 */

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
