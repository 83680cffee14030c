/* TypeTable: a dict by type, with a shortcut for those types that are hashed and compared by their identity. Included
 * once, by hotpath.c.
 *
 * A look-up in a dict of thousands of types touches the type, an index and an entry, each in a line of memory of its
 * own that is rarely in the cache; here it touches one line, of four places. A type whose line is full is looked up in
 * the dict, as ever.
 */

#define PLACES 4
#define LINE 64

typedef struct {
    PyTypeObject *kind;
    PyObject *found;
} TablePlace;

/* What a place refers to is a reference of its own: who changes the dict behind the table's back (`dict.clear(table)`)
 * gets old answers, and no crash. */
typedef struct {
    PyDictObject dict;
    void *memory;
    TablePlace *places; /* in `memory`, where a line begins */
    Py_ssize_t lines;   /* a power of two, or 0 */
} TypeTable;

static PyTypeObject TypeTableType;

/* Whether a type is hashed and compared by its identity, so that to look it up runs no code of the user's. */
static inline int
is_plain(PyTypeObject *kind)
{
    PyTypeObject *meta = Py_TYPE(kind);
    return meta == &PyType_Type
           || (meta->tp_hash == PyType_Type.tp_hash && meta->tp_richcompare == PyType_Type.tp_richcompare);
}

/* by_type.get(kind): a borrowed reference, or NULL, with or without an error. A key of a metaclass with a comparison of
 * its own is compared if its hash happens to be the same: then code of the user's runs here. */
static inline PyObject *
find_by_type(PyObject *by_type, PyTypeObject *kind)
{
    return is_plain(kind) ? PyDict_GetItemWithError(by_type, (PyObject *)kind) : NULL;
}

/* The line of a type, among so many lines. */
static inline const TablePlace *
line_of(const TablePlace *places, Py_ssize_t lines, PyTypeObject *kind)
{
    uint64_t mixed = (uint64_t)(uintptr_t)kind * UINT64_C(0x9E3779B97F4A7C15);
    return &places[PLACES * (Py_ssize_t)((mixed >> 32) & (uint64_t)(lines - 1))];
}

static inline TablePlace *
table_line(TypeTable *self, PyTypeObject *kind)
{
    return (TablePlace *)line_of(self->places, self->lines, kind);
}

/* What a line says of a type: a borrowed reference, or NULL. All places are looked at, without a branch: in which one a
 * type stands can't be foreseen, and a branch that goes wrong would throw away what was begun for the next items. */
static inline PyObject *
line_known(const TablePlace *line, PyTypeObject *kind)
{
    uintptr_t found = 0;
    for (int index = 0; index < PLACES; index++) {
        found |= (uintptr_t)line[index].found & -(uintptr_t)(line[index].kind == kind);
    }
    return (PyObject *)found;
}

/* What is known of a type without the dict: a borrowed reference, or NULL. It runs nobody's code. */
static inline PyObject *
table_known(TypeTable *self, PyTypeObject *kind)
{
    return self->lines == 0 ? NULL : line_known(table_line(self, kind), kind);
}

/* Forget everything. Finalizers run when the table is empty. */
static void
table_forget(TypeTable *self)
{
    void *memory = self->memory;
    TablePlace *places = self->places;
    Py_ssize_t count = self->lines * PLACES;
    self->memory = NULL;
    self->places = NULL;
    self->lines = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_XDECREF(places[index].kind);
        Py_XDECREF(places[index].found);
    }
    PyMem_Free(memory);
}

/* Forget one type, if it is known. */
static void
table_forget_one(TypeTable *self, PyObject *kind)
{
    if (self->lines == 0) {
        return;
    }
    TablePlace *line = table_line(self, (PyTypeObject *)kind);
    for (int index = 0; index < PLACES; index++) {
        if (line[index].kind == (PyTypeObject *)kind) {
            TablePlace gone = line[index];
            line[index] = (TablePlace){NULL, NULL};
            Py_DECREF(gone.kind);
            Py_DECREF(gone.found);
            return;
        }
    }
}

/* Remember what was just found, unless the type is known already: `line_known` relies on its standing in one place. A
 * table that is too small is made anew, and remembers from the next look-up on; for want
 * of memory it stays. */
static void
table_remember(TypeTable *self, PyTypeObject *kind, PyObject *found)
{
    Py_ssize_t count = PyDict_GET_SIZE(self);
    if (count > 2 * self->lines) {
        Py_ssize_t lines = 2;
        while (lines < count) {
            lines *= 2;
        }
        void *memory = PyMem_Calloc((size_t)lines + 1, LINE);
        if (memory != NULL) {
            do {
                table_forget(self);
            } while (self->lines != 0); /* used by a finalizer meanwhile */
            self->memory = memory;
            self->places = (TablePlace *)(((uintptr_t)memory + LINE - 1) / LINE * LINE);
            self->lines = lines;
        }
        return;
    }
    TablePlace *line = table_line(self, kind);
    int known = line_known(line, kind) != NULL;
    for (int index = 0; index < PLACES && !known; index++) {
        if (line[index].kind == NULL) {
            line[index].kind = (PyTypeObject *)Py_NewRef((PyObject *)kind);
            line[index].found = Py_NewRef(found);
            return;
        }
    }
}

/* table.get(kind), for a table or a dict: a new reference, or NULL, with or without an error. */
static PyObject *
look_up(PyObject *by_type, PyTypeObject *kind)
{
    int is_table = Py_IS_TYPE(by_type, &TypeTableType);
    PyObject *found = is_table ? table_known((TypeTable *)by_type, kind) : NULL;
    if (found != NULL) {
        return Py_NewRef(found);
    }
    Py_INCREF(by_type);
    Py_INCREF(kind);
    found = Py_XNewRef(find_by_type(by_type, kind));
    /* A comparison may have changed the dict meanwhile: what it says now is what is remembered. */
    if (found != NULL && is_table && table_known((TypeTable *)by_type, kind) == NULL) {
        PyObject *still = PyDict_GetItemWithError(by_type, (PyObject *)kind);
        if (still == found) {
            table_remember((TypeTable *)by_type, kind, found);
        }
        else if (still == NULL && PyErr_Occurred()) {
            Py_CLEAR(found);
        }
    }
    Py_DECREF(kind);
    Py_DECREF(by_type);
    return found;
}

/* Whether it is a dict that `look_up` takes. */
static inline int
is_by_type(PyObject *op)
{
    return op != NULL && (Py_IS_TYPE(op, &TypeTableType) || PyDict_CheckExact(op));
}

/* table[kind] = found, and del table[kind] */
static int
table_set(PyObject *op, PyObject *kind, PyObject *found)
{
    table_forget_one((TypeTable *)op, kind);
    int done = PyDict_Type.tp_as_mapping->mp_ass_subscript(op, kind, found);
    table_forget_one((TypeTable *)op, kind); /* a comparison may have looked it up once more */
    return done;
}

/* dict.pop(table, ...) */
static PyObject *
dict_pop(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    PyObject *method = PyObject_GetAttrString((PyObject *)&PyDict_Type, "pop");
    PyObject *all = method == NULL ? NULL : PyTuple_New(count + 1);
    PyObject *result = NULL;
    if (all != NULL) {
        PyTuple_SET_ITEM(all, 0, Py_NewRef(op));
        for (Py_ssize_t index = 0; index < count; index++) {
            PyTuple_SET_ITEM(all, index + 1, Py_NewRef(args[index]));
        }
        result = PyObject_Call(method, all, NULL);
    }
    Py_XDECREF(all);
    Py_XDECREF(method);
    return result;
}

static PyObject *
table_pop(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    if (count > 0) {
        table_forget_one((TypeTable *)op, args[0]);
    }
    PyObject *result = dict_pop(op, args, count);
    if (count > 0) {
        table_forget_one((TypeTable *)op, args[0]);
    }
    return result;
}

static PyObject *
table_clear_all(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    table_forget((TypeTable *)op);
    PyDict_Clear(op);
    table_forget((TypeTable *)op);
    Py_RETURN_NONE;
}

static PyObject *
table_refuse(PyObject *op, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_Format(PyExc_TypeError, "a %s is changed by its items, pop and clear alone", Py_TYPE(op)->tp_name);
    return NULL;
}

static PyMethodDef table_methods[] = {
    {"pop", (PyCFunction)(void (*)(void))table_pop, METH_FASTCALL, "As of a dict."},
    {"clear", table_clear_all, METH_NOARGS, "As of a dict."},
    {"popitem", (PyCFunction)(void (*)(void))table_refuse, METH_VARARGS | METH_KEYWORDS, "Nobody needs it."},
    {"setdefault", (PyCFunction)(void (*)(void))table_refuse, METH_VARARGS | METH_KEYWORDS, "Nobody needs it."},
    {"update", (PyCFunction)(void (*)(void))table_refuse, METH_VARARGS | METH_KEYWORDS, "Nobody needs it."},
    {NULL, NULL, 0, NULL},
};

static PyMappingMethods table_as_mapping = {
    .mp_ass_subscript = table_set,
};

static int
table_traverse(PyObject *op, visitproc visit, void *arg)
{
    TypeTable *self = (TypeTable *)op;
    for (Py_ssize_t index = 0; index < self->lines * PLACES; index++) {
        Py_VISIT(self->places[index].kind);
        Py_VISIT(self->places[index].found);
    }
    return PyDict_Type.tp_traverse(op, visit, arg);
}

static int
table_clear(PyObject *op)
{
    table_forget((TypeTable *)op);
    return PyDict_Type.tp_clear(op);
}

static void
table_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    table_forget((TypeTable *)op);
    PyDict_Type.tp_dealloc(op);
}

static PyObject *
table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) != 0 || kwargs != NULL) {
        PyErr_SetString(PyExc_TypeError, "TypeTable() takes no arguments");
        return NULL;
    }
    PyObject *op = PyDict_Type.tp_new(type, args, NULL);
    if (op != NULL) {
        ((TypeTable *)op)->memory = ((TypeTable *)op)->places = NULL;
        ((TypeTable *)op)->lines = 0;
    }
    return op;
}

static PyTypeObject TypeTableType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batchqueue_async._native.hotpath.TypeTable",
    .tp_doc = "A dict by type, in which plain types are found fast.",
    .tp_basicsize = sizeof(TypeTable),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = table_new,
    .tp_dealloc = table_dealloc,
    .tp_traverse = table_traverse,
    .tp_clear = table_clear,
    .tp_as_mapping = &table_as_mapping,
    .tp_methods = table_methods,
};
