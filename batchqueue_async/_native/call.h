/* Call: the coroutine that `produce` returns, and what goes on with a handler's after its first step. Included once, by
 * hotpath.c.
 */

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
