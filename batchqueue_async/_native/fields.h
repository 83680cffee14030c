/* The fields of the Python classes that the hot path reads and writes: of partitions and lanes, of queues and their
 * inboxes, of drain tasks, their rounds and handlers. The Python classes inherit these types. Included once, by
 * hotpath.c.
 *
 * In each type the fields that are objects stand together, so that one function visits them, and one clears them.
 */

/* Where the objects among a type's fields begin, and how many they are. */
typedef struct {
    size_t first;
    size_t count;
} Objects;

static PyObject **
objects_of(PyObject *op, Objects objects)
{
    return (PyObject **)((char *)op + objects.first);
}

static int
objects_traverse(PyObject *op, Objects objects, visitproc visit, void *arg)
{
    PyObject **each = objects_of(op, objects);
    for (size_t index = 0; index < objects.count; index++) {
        Py_VISIT(each[index]);
    }
    return 0;
}

static int
objects_clear(PyObject *op, Objects objects)
{
    PyObject **each = objects_of(op, objects);
    for (size_t index = 0; index < objects.count; index++) {
        Py_CLEAR(each[index]);
    }
    return 0;
}

static void
objects_dealloc(PyObject *op, Objects objects)
{
    PyObject_GC_UnTrack(op);
    objects_clear(op, objects);
    Py_TYPE(op)->tp_free(op);
}

/* A type with the members `NAME_members`, whose objects are those from FIRST to LAST. */
#define FIELDS_TYPE(NAME, FIRST, LAST, DOC)                                                                           \
    static const Objects NAME##_objects = {                                                                           \
        offsetof(NAME, FIRST), (offsetof(NAME, LAST) - offsetof(NAME, FIRST)) / sizeof(PyObject *) + 1};              \
    static int NAME##_traverse(PyObject *op, visitproc visit, void *arg)                                              \
    {                                                                                                                 \
        return objects_traverse(op, NAME##_objects, visit, arg);                                                      \
    }                                                                                                                 \
    static int NAME##_clear(PyObject *op)                                                                             \
    {                                                                                                                 \
        return objects_clear(op, NAME##_objects);                                                                     \
    }                                                                                                                 \
    static void NAME##_dealloc(PyObject *op)                                                                          \
    {                                                                                                                 \
        objects_dealloc(op, NAME##_objects);                                                                          \
    }                                                                                                                 \
    static PyTypeObject NAME##Type = {                                                                                \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "batchqueue_async._native.hotpath." #NAME,                           \
        .tp_doc = DOC,                                                                                                \
        .tp_basicsize = sizeof(NAME),                                                                                 \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,                                    \
        .tp_new = PyType_GenericNew,                                                                                  \
        .tp_dealloc = NAME##_dealloc,                                                                                 \
        .tp_traverse = NAME##_traverse,                                                                               \
        .tp_clear = NAME##_clear,                                                                                     \
        .tp_members = NAME##_members,                                                                                 \
    }

#define OBJECT(STRUCT, FIELD, NAME) {NAME, T_OBJECT_EX, offsetof(STRUCT, FIELD), 0, NULL}
#define COUNT(STRUCT, FIELD, NAME) {NAME, T_PYSSIZET, offsetof(STRUCT, FIELD), 0, NULL}
#define FLAG(STRUCT, FIELD, NAME) {NAME, T_BOOL, offsetof(STRUCT, FIELD), 0, NULL}
#define NO_MORE {NULL, 0, 0, 0, NULL}

/* -- Place: where items come in, a partition or a lane -------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_ssize_t batch; /* how many items were taken from here last: the next list begins with as many places */
    PyObject *tail;
    PyObject *fast_slots;
} Place;

static PyMemberDef Place_members[] = {
    OBJECT(Place, tail, "tail"),
    OBJECT(Place, fast_slots, "fast_slots"),
    NO_MORE,
};

FIELDS_TYPE(Place, tail, fast_slots,
            "Where items come in: a list, and the countdown of the places that may be filled without a further look.");

/* -- Partition and Lane: each begins as a Place --------------------------------------------------------------------- */

typedef struct {
    Place place;
    PyObject *lanes;
    PyObject *sealed;
    PyObject *byte_room;
    PyObject *waiters;
    PyObject *credits;
    PyObject *on_ready;
    PyObject *linger_step;
    PyObject *since;
    PyObject *marks;
    PyObject *ranges;
    PyObject *leaving;
    PyObject *next_owner;
    Py_ssize_t in_lanes;
    Py_ssize_t armed;
    Py_ssize_t capacity;
    Py_ssize_t held;
    Py_ssize_t removed;
    Py_ssize_t in_flight;
    Py_ssize_t flight_start;
    char closed;
    char listed;
} PartitionFields;

static PyMemberDef PartitionFields_members[] = {
    OBJECT(PartitionFields, lanes, "lanes"),
    OBJECT(PartitionFields, sealed, "_sealed"),
    OBJECT(PartitionFields, byte_room, "byte_room"),
    OBJECT(PartitionFields, waiters, "waiters"),
    OBJECT(PartitionFields, credits, "credits"),
    OBJECT(PartitionFields, on_ready, "on_ready"),
    OBJECT(PartitionFields, linger_step, "linger_step"),
    OBJECT(PartitionFields, since, "since"),
    OBJECT(PartitionFields, marks, "marks"),
    OBJECT(PartitionFields, ranges, "ranges"),
    OBJECT(PartitionFields, leaving, "leaving"),
    OBJECT(PartitionFields, next_owner, "next_owner"),
    COUNT(PartitionFields, in_lanes, "_in_lanes"),
    COUNT(PartitionFields, armed, "_armed"),
    COUNT(PartitionFields, capacity, "capacity"),
    COUNT(PartitionFields, held, "held"),
    COUNT(PartitionFields, removed, "removed"),
    COUNT(PartitionFields, in_flight, "in_flight"),
    COUNT(PartitionFields, flight_start, "flight_start"),
    FLAG(PartitionFields, closed, "closed"),
    FLAG(PartitionFields, listed, "listed"),
    NO_MORE,
};

/* It is a Place too: its base is set as the module is made. */
FIELDS_TYPE(PartitionFields, place.tail, next_owner, "What the hot path uses of a partition.");

typedef struct {
    Place place;
    PyObject *kind;
    PyObject *partition;
    char asleep;
} LaneFields;

static PyMemberDef LaneFields_members[] = {
    OBJECT(LaneFields, kind, "kind"),
    OBJECT(LaneFields, partition, "partition"),
    FLAG(LaneFields, asleep, "asleep"),
    NO_MORE,
};

FIELDS_TYPE(LaneFields, place.tail, partition, "What the hot path uses of a lane.");

/* -- RouterFields: of PartitionRouter ------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *turns;      /* of round_robin() */
    PyObject *key;        /* of by_key(key) */
    PyObject *partitions;
    PyObject *fences;     /* not empty while keys move to more partitions */
    Py_ssize_t width;
} RouterFields;

static PyMemberDef RouterFields_members[] = {
    OBJECT(RouterFields, turns, "_turns"),
    OBJECT(RouterFields, key, "_key"),
    OBJECT(RouterFields, partitions, "partitions"),
    OBJECT(RouterFields, fences, "_fences"),
    COUNT(RouterFields, width, "_width"),
    NO_MORE,
};

FIELDS_TYPE(RouterFields, turns, fences, "What the hot path reads of a router: its selector and its partitions.");

/* -- Entrance, Share, Inbox, Door: of BatchQueue, PartitionCredits, ThreadInbox, SyncQueue -------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *only;
    PyObject *by_type;
    PyObject *router;
    unsigned long thread;
} Entrance;

static PyMemberDef Entrance_members[] = {
    OBJECT(Entrance, only, "_only"),
    OBJECT(Entrance, by_type, "_by_type"),
    OBJECT(Entrance, router, "_router"),
    {"_thread", T_ULONG, offsetof(Entrance, thread), 0, NULL},
    NO_MORE,
};

FIELDS_TYPE(Entrance, only, router,
            "What the hot path reads of a queue: its thread, its only partition, its routes by type, its router.");

typedef struct {
    PyObject_HEAD
    PyObject *items;
    Py_ssize_t free;
    Py_ssize_t batch; /* how many items were taken out last: the next list begins with as many places */
} Share;

static PyMemberDef Share_members[] = {
    OBJECT(Share, items, "items"),
    COUNT(Share, free, "free"),
    COUNT(Share, batch, "batch"),
    NO_MORE,
};

FIELDS_TYPE(Share, items, items, "Places for the items of other threads, and the items that have taken some.");

typedef struct {
    PyObject_HEAD
    PyObject *only;
    PyObject *by_type;
    PyObject *key;
    PyObject *shares;
    PyObject *lock;
    Py_ssize_t turn;  /* of round_robin(); below 0 for other selectors */
    Py_ssize_t width; /* among how many partitions a selector of the user's, or by_key(key), chooses; 0 for others */
    char waking;
} Inbox;

static PyMemberDef Inbox_members[] = {
    OBJECT(Inbox, only, "only"),
    OBJECT(Inbox, by_type, "by_type"),
    OBJECT(Inbox, key, "_key"),
    OBJECT(Inbox, shares, "_shares"),
    OBJECT(Inbox, lock, "lock"),
    COUNT(Inbox, turn, "_turn"),
    COUNT(Inbox, width, "_width"),
    FLAG(Inbox, waking, "waking"),
    NO_MORE,
};

FIELDS_TYPE(Inbox, only, lock,
            "What the hot path reads of an inbox: its lock, its shares, and whether the loop was asked to collect.");

typedef struct {
    PyObject_HEAD
    PyObject *inbox;
} Door;

static PyMemberDef Door_members[] = {
    OBJECT(Door, inbox, "_inbox"),
    NO_MORE,
};

FIELDS_TYPE(Door, inbox, inbox, "What the hot path reads of a queue's bridge: its inbox.");

/* -- DrainTask, Round ---------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *ready;
    PyObject *clock;
    PyObject *dispatch;
    PyObject *sleeper;
    char prompt;
    char disturbed;
} DrainFields;

static PyMemberDef DrainFields_members[] = {
    OBJECT(DrainFields, ready, "ready"),
    OBJECT(DrainFields, clock, "clock"),
    OBJECT(DrainFields, dispatch, "dispatch"),
    OBJECT(DrainFields, sleeper, "_sleeper"),
    FLAG(DrainFields, prompt, "prompt"),
    FLAG(DrainFields, disturbed, "disturbed"),
    NO_MORE,
};

FIELDS_TYPE(DrainFields, ready, sleeper, "What the hot path uses of a drain task.");

typedef struct {
    PyObject_HEAD
    PyObject *drain;
    PyObject *calls;
    PyObject *chunks;
    PyObject *numbers;
    Py_ssize_t call_index;
    Py_ssize_t pending;
    double began;
    char abandoned;
} RoundFields;

static PyMemberDef RoundFields_members[] = {
    OBJECT(RoundFields, drain, "drain"),
    OBJECT(RoundFields, calls, "calls"),
    OBJECT(RoundFields, chunks, "chunks"),
    OBJECT(RoundFields, numbers, "_numbers"),
    COUNT(RoundFields, call_index, "call_index"),
    COUNT(RoundFields, pending, "pending"),
    {"began", T_DOUBLE, offsetof(RoundFields, began), 0, NULL},
    FLAG(RoundFields, abandoned, "abandoned"),
    NO_MORE,
};

FIELDS_TYPE(RoundFields, drain, numbers, "What the hot path uses of a round.");

/* -- HandlerEntry, CallLimiter, Counters, Sizes ------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *consume;
    PyObject *turns;
    PyObject *timeout;
    PyObject *durations;
    Py_ssize_t most;
    Py_ssize_t calls;
    Py_ssize_t items;
    unsigned long long mark; /* the last grouping in which it was met */
} HandlerFields;

static PyMemberDef HandlerFields_members[] = {
    OBJECT(HandlerFields, consume, "consume"),
    OBJECT(HandlerFields, turns, "turns"),
    OBJECT(HandlerFields, timeout, "timeout"),
    OBJECT(HandlerFields, durations, "durations"),
    COUNT(HandlerFields, most, "most"),
    COUNT(HandlerFields, calls, "calls"),
    COUNT(HandlerFields, items, "items"),
    NO_MORE,
};

FIELDS_TYPE(HandlerFields, consume, durations, "What the hot path uses of a handler.");

typedef struct {
    PyObject_HEAD
    PyObject *holders;
    PyObject *waiting;
    Py_ssize_t limit;
} TurnFields;

static PyMemberDef TurnFields_members[] = {
    OBJECT(TurnFields, holders, "holders"),
    OBJECT(TurnFields, waiting, "waiting"),
    COUNT(TurnFields, limit, "limit"),
    NO_MORE,
};

FIELDS_TYPE(TurnFields, holders, waiting, "What the hot path uses of the turns of a handler.");

typedef struct {
    PyObject_HEAD
    Py_ssize_t handled;
} CounterFields;

static PyMemberDef CounterFields_members[] = {
    COUNT(CounterFields, handled, "handled"),
    NO_MORE,
};

static PyTypeObject CounterFieldsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "batchqueue_async._native.hotpath.CounterFields",
    .tp_doc = "What the hot path uses of a queue's counts.",
    .tp_basicsize = sizeof(CounterFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = CounterFields_members,
};

typedef struct {
    PyObject_HEAD
    PyObject *exact;
    Py_ssize_t last;
    Py_ssize_t times;
} SizeFields;

static PyMemberDef SizeFields_members[] = {
    OBJECT(SizeFields, exact, "exact"),
    COUNT(SizeFields, last, "last"),
    COUNT(SizeFields, times, "times"),
    NO_MORE,
};

FIELDS_TYPE(SizeFields, exact, exact, "What the hot path uses of the counts of batch sizes.");
