/* The drain task's half of the hot path: a partition's first item, a round's take, its sorting by handler, the calls,
 * and the end of the round. Included once, by hotpath.c.
 *
 * All of them take what is usual and leave the rest: a handler that waits, raises or answers with anything but a
 * coroutine goes on in Python, and so does a partition that has waiters, credits, bytes or numbers to look after.
 *
 * Until Python 3.12 the garbage collector may run, and finalizers with it, wherever an object is made. So whatever is
 * needed is made first; then everything is looked at once more, and changed in one go.
 */

/* Whether a field has its usual value, None: NULL is for the Python. */
static inline int
is_none(PyObject *field)
{
    return field == Py_None;
}

static inline Countdown *
countdown_of(Place *place)
{
    PyObject *slots = place->fast_slots;
    return slots != NULL && Py_IS_TYPE(slots, &CountdownType) ? (Countdown *)slots : NULL;
}

/* -- the first item of a partition ------------------------------------------------------------------------------------ */

/* Whether a partition is empty, unlisted and open to anybody, as `Partition.offer` asks. */
static int
may_be_first(PartitionFields *self)
{
    return !self->closed && !self->listed && is_none(self->waiters) && is_none(self->byte_room)
           && is_none(self->linger_step) && self->held < self->capacity && countdown_of(&self->place) != NULL;
}

/* Whether a drain task lists a partition without a further look: it is awake, and nothing lingers; -1 for an error. An
 * attribute of its dispatch is read, which may be code of the user's: before the last look. */
static int
lists_at_once(DrainFields *drain)
{
    if (!drain->prompt || !is_none(drain->sleeper) || drain->ready == NULL || drain->clock == NULL) {
        return 0;
    }
    if (drain->dispatch == NULL || !Py_IS_TYPE(drain->ready, deque_type)) {
        return 0;
    }
    PyObject *dispatch = Py_NewRef(drain->dispatch);
    PyObject *lingers = PyObject_GetAttr(dispatch, name_lingers);
    Py_DECREF(dispatch);
    if (lingers == NULL) {
        return -1;
    }
    Py_DECREF(lingers);
    return lingers == Py_False;
}

/* The drain task whose `on_ready` a partition tells of its first item, as a new reference; NULL for anything else. */
static DrainFields *
drain_of(PartitionFields *partition)
{
    PyObject *told = partition->on_ready;
    if (told == NULL || !Py_IS_TYPE(told, &PyMethod_Type)) {
        return NULL;
    }
    PyObject *drain = PyMethod_GET_SELF(told);
    if (PyMethod_GET_FUNCTION(told) != on_ready_method || !is_kind(drain, &DrainFieldsType)) {
        return NULL;
    }
    return (DrainFields *)Py_NewRef(drain);
}

/* The clock's time, a float; NULL with or without an error. */
static PyObject *
time_of(DrainFields *drain)
{
    PyObject *clock = Py_NewRef(drain->clock);
    PyObject *now = PyObject_CallNoArgs(clock);
    Py_DECREF(clock);
    if (now != NULL && !PyFloat_CheckExact(now)) {
        Py_CLEAR(now);
    }
    return now;
}

/* Set the fast slots of a partition and of its lanes that are awake; those that were there are countdowns, whose end
 * runs nobody's code. A lane with anything else keeps it. */
static void
set_slots(PartitionFields *self, Countdown *slots)
{
    Py_XSETREF(self->place.fast_slots, Py_NewRef((PyObject *)slots));
    if (self->lanes == NULL || !PyDict_CheckExact(self->lanes)) {
        return;
    }
    PyObject *lane;
    Py_ssize_t at = 0;
    while (PyDict_Next(self->lanes, &at, &lane, NULL)) {
        if (is_kind(lane, &LaneFieldsType) && countdown_of((Place *)lane) != NULL) {
            Py_XSETREF(((Place *)lane)->fast_slots, Py_NewRef((PyObject *)slots));
        }
    }
}

/* The countdown for the places of a partition that has none free: that of its last round, which `take_whole` has ended,
 * so that its lanes have it already; or a new one. */
static Countdown *
own_slots(PartitionFields *self)
{
    Countdown *slots = countdown_of(&self->place);
    if (slots != NULL && slots != no_slots && slots->left == 0) {
        return (Countdown *)Py_NewRef((PyObject *)slots);
    }
    return PyObject_New(Countdown, &CountdownType);
}

/* DrainTask.on_ready, for a partition that is not lingering: 1 if it is listed now, 0 for the Python, -1. */
static int
list_partition(DrainFields *drain, PyObject *partition)
{
    PyObject *done = PyObject_CallMethodOneArg(drain->ready, name_append, partition);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

/* Partition.offer and offer_many, where the partition is empty and has a drain task that is awake: 1, 0 for the Python,
 * or -1.
 *
 * `into` is the partition itself, or one of its lanes; `many` is a list or a tuple of items, or NULL: then it is `item`. */
static int
put_first(PyObject *into, PyObject *item, PyObject *many)
{
    PartitionFields *partition;
    if (is_kind(into, &LaneFieldsType)) {
        PyObject *found = ((LaneFields *)into)->partition;
        if (((LaneFields *)into)->asleep || found == NULL || !is_kind(found, &PartitionFieldsType)) {
            return 0;
        }
        partition = (PartitionFields *)found;
    }
    else if (is_kind(into, &PartitionFieldsType)) {
        partition = (PartitionFields *)into;
    }
    else {
        return 0;
    }
    if (!may_be_first(partition)) {
        return 0;
    }
    Py_INCREF(partition);
    int put = 0;
    PyObject *now = NULL;
    Countdown *slots = NULL;
    DrainFields *drain = drain_of(partition);
    if (drain != NULL && lists_at_once(drain) > 0) {
        now = time_of(drain);
        slots = now == NULL ? NULL : own_slots(partition);
    }
    if (slots != NULL) {
        int is_lane = into != (PyObject *)partition;
        PyObject *tail = ((Place *)into)->tail;
        DrainFields *still = drain_of(partition);
        /* the last look: from here on nobody else's code runs */
        PyObject *const *items = many == NULL ? &item : PySequence_Fast_ITEMS(many);
        Py_ssize_t count = many == NULL ? 1 : PySequence_Fast_GET_SIZE(many);
        if (may_be_first(partition) && count > 0 && count <= partition->capacity - partition->held && still == drain
            && is_none(drain->sleeper) && drain->ready != NULL && Py_IS_TYPE(drain->ready, deque_type) && tail != NULL
            && tail != many && PyList_CheckExact(tail)
            && !(is_lane && (((LaneFields *)into)->asleep || partition->lanes == NULL))) {
            Py_ssize_t end = PyList_GET_SIZE(tail);
            put = list_extend(tail, items, count, ((Place *)into)->batch) < 0
                      ? -1
                      : list_partition(drain, (PyObject *)partition);
            if (put < 0 && PyList_GET_SIZE(tail) > end) {
                PyObject *type, *value, *traceback;
                PyErr_Fetch(&type, &value, &traceback);
                PyList_SetSlice(tail, end, PyList_GET_SIZE(tail), NULL);
                PyErr_Restore(type, value, traceback);
            }
            if (put > 0) {
                Py_ssize_t before = countdown_of(&partition->place)->left;
                slots->left = partition->capacity - partition->held - count;
                partition->listed = 1;
                if (partition->lanes != NULL && partition->lanes != Py_None) {
                    partition->in_lanes += (is_lane ? count : 0) + partition->armed - before;
                    partition->armed = slots->left;
                }
                Py_XSETREF(partition->since, Py_NewRef(now));
                if (partition->place.fast_slots != (PyObject *)slots) {
                    set_slots(partition, slots);
                }
            }
        }
        Py_XDECREF(still);
    }
    Py_XDECREF(slots);
    Py_XDECREF(now);
    Py_XDECREF(drain);
    Py_DECREF(partition);
    return PyErr_Occurred() ? -1 : put; /* an error of the clock's, say */
}

/* The method DrainTask.on_ready itself, told of the partition. */
static PyObject *
step_on_ready(PyObject *Py_UNUSED(function), PyObject *op, PyObject *told)
{
    DrainFields *drain = (DrainFields *)op;
    if (!is_kind(told, &PartitionFieldsType) || !is_none(((PartitionFields *)told)->linger_step)) {
        return NULL;
    }
    PyObject *now = lists_at_once(drain) > 0 ? time_of(drain) : NULL;
    if (now == NULL) {
        return NULL;
    }
    if (is_none(((PartitionFields *)told)->linger_step) && is_none(drain->sleeper) && drain->ready != NULL
        && Py_IS_TYPE(drain->ready, deque_type)) {
        if (list_partition(drain, told) > 0) {
            return now;
        }
    }
    Py_DECREF(now);
    return NULL;
}

/* -- a round's take ------------------------------------------------------------------------------------------------- */

/* So many lanes may be awake in vain, as QUIET_LANES in partition.py says; beyond, the Python puts some to sleep. */
#define QUIET_LANES 8
#define MOST_LANES 1024

/* How many items are inside a partition that may be taken whole: Partition.take_runs at its simplest. -1 if not. */
static Py_ssize_t
whole_size(PartitionFields *self, Py_ssize_t most)
{
    if (!is_none(self->waiters) || !is_none(self->byte_room) || !is_none(self->marks)) {
        return -1;
    }
    if (!is_none(self->sealed)
        && (self->sealed == NULL || !Py_IS_TYPE(self->sealed, deque_type) || PyObject_Size(self->sealed) != 0)) {
        return -1;
    }
    Countdown *slots = countdown_of(&self->place);
    if (slots == NULL || self->place.tail == NULL || !PyList_CheckExact(self->place.tail) || self->since == NULL
        || !PyFloat_CheckExact(self->since) || self->lanes == NULL) {
        return -1;
    }
    Py_ssize_t size = PyList_GET_SIZE(self->place.tail);
    if (self->lanes != Py_None) {
        size += self->in_lanes + self->armed - slots->left;
    }
    return size > 0 && size <= most ? size : -1;
}

/* The places of a partition that have items, as strong references: how many; -1 if they are not for this function. */
static Py_ssize_t
places_of(PartitionFields *self, Place **places)
{
    Py_ssize_t count = 0;
    if (PyList_GET_SIZE(self->place.tail) > 0) {
        places[count++] = &self->place;
    }
    if (self->lanes == Py_None) {
        Py_XINCREF(count ? places[0] : NULL);
        return count;
    }
    if (!PyDict_CheckExact(self->lanes) || PyDict_GET_SIZE(self->lanes) >= MOST_LANES) {
        return -1;
    }
    PyObject *lane;
    Py_ssize_t at = 0;
    while (PyDict_Next(self->lanes, &at, &lane, NULL)) {
        if (!is_kind(lane, &LaneFieldsType) || ((LaneFields *)lane)->kind == NULL
            || countdown_of((Place *)lane) == NULL || ((Place *)lane)->tail == NULL
            || !PyList_CheckExact(((Place *)lane)->tail)) {
            return -1;
        }
        if (PyList_GET_SIZE(((Place *)lane)->tail) > 0) {
            places[count++] = (Place *)lane;
        }
    }
    if (PyDict_GET_SIZE(self->lanes) > QUIET_LANES + 3 * count) {
        return -1;
    }
    for (at = 0; at < count; at++) {
        Py_INCREF(places[at]);
    }
    return count;
}

/* Empty lists for the lanes: those that were taken come back when their round is over. To make thousands of lists anew
 * in each round would have the garbage collector look through everything that there is, again and again. */
#define MOST_SPARE_LISTS 4096
static PyObject *spare_lists[MOST_SPARE_LISTS];
static Py_ssize_t spare_count = 0;
static Py_ssize_t lists_out = 0; /* how many of them are in use */

static PyObject *
list_new(void)
{
    lists_out++;
    return spare_count > 0 ? spare_lists[--spare_count] : PyList_New(0);
}

/* Keep an empty list if nobody else has it. A short one keeps its memory: to grow again item by item would cost as much
 * as the calls, where there are many types. */
#define KEPT_PLACES 128

static void
list_keep(PyObject *list)
{
    if (Py_REFCNT(list) == 1 && PyList_GET_SIZE(list) == 0 && spare_count < MOST_SPARE_LISTS && lists_out > 0) {
        if (((PyListObject *)list)->allocated > KEPT_PLACES) {
            (void)PyList_SetSlice(list, 0, 0, NULL);
        }
        lists_out--;
        spare_lists[spare_count++] = list;
    }
    else {
        Py_DECREF(list);
    }
}

/* Let go of a list's items, and keep it. Finalizers may run, and find the list: it is looked at anew after each of
 * them. */
static void
list_retire(PyObject *list)
{
    Py_ssize_t last = PyList_GET_SIZE(list);
    while (last > 0 && Py_REFCNT(list) == 1 && PyList_GET_SIZE(list) == last) {
        PyObject **each = ((PyListObject *)list)->ob_item;
        PyObject *item = each[--last];
        /* of an item that somebody else has too, nobody learns that it is let go of */
        for (; last > 0 && Py_REFCNT(item) > 1; item = each[--last]) {
            Py_DECREF(item);
        }
        Py_SET_SIZE(list, last);
        Py_DECREF(item);
    }
    list_keep(list);
}

/* A list of its own for a handler: the same items. */
static PyObject *
list_copy(PyObject *items)
{
    PyObject *copy = list_new();
    if (copy == NULL) {
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(items);
    if (list_reserve(copy, count) < 0) {
        Py_CLEAR(copy);
        return NULL;
    }
    if (((PyListObject *)copy)->allocated < count) {
        if (PyList_SetSlice(copy, 0, 0, items) < 0) {
            Py_CLEAR(copy);
        }
        return copy;
    }
    PyObject **from = ((PyListObject *)items)->ob_item, **into = ((PyListObject *)copy)->ob_item;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *item = from[index];
        into[index] = Py_NewRef(item);
    }
    Py_SET_SIZE(copy, count);
    return copy;
}

/* `list_retire` for a list and the copy of it that a handler had: each item is touched once. */
static void
lists_retire(PyObject *list, PyObject *copy)
{
    Py_ssize_t last = PyList_GET_SIZE(list);
    while (last > 0 && Py_REFCNT(list) == 1 && Py_REFCNT(copy) == 1 && PyList_GET_SIZE(list) == last
           && PyList_GET_SIZE(copy) == last) {
        PyObject **each = ((PyListObject *)list)->ob_item, **other = ((PyListObject *)copy)->ob_item;
        PyObject *item = each[--last], *same = other[last];
        for (; last > 0 && item == same && Py_REFCNT(item) > 2; item = each[--last], same = other[last]) {
            Py_DECREF(item);
            Py_DECREF(item);
        }
        Py_SET_SIZE(list, last);
        Py_SET_SIZE(copy, last);
        Py_DECREF(same);
        Py_DECREF(item);
    }
    list_retire(copy);
    list_retire(list);
}

/* Lists of so many None, which stand in a round for items that are let go of: one for each place of this table, and of
 * all together so many None at most. */
#define STAND_INS 512
#define MOST_NONES (1 << 17)
static PyObject *stand_ins[STAND_INS];
static Py_ssize_t nones_kept = 0;

static PyObject *
nones_of(Py_ssize_t count)
{
    PyObject **kept = &stand_ins[count % STAND_INS];
    if (*kept != NULL && PyList_GET_SIZE(*kept) == count) {
        return Py_NewRef(*kept);
    }
    if (count > MOST_NONES / 4) {
        return NULL;
    }
    PyObject *made = PyList_New(count);
    if (made == NULL) {
        return NULL;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        PyList_SET_ITEM(made, index, Py_NewRef(Py_None));
    }
    for (int index = 0; index < STAND_INS; index++) {
        if (stand_ins[index] != NULL && (&stand_ins[index] == kept || nones_kept + count > MOST_NONES)) {
            nones_kept -= PyList_GET_SIZE(stand_ins[index]);
            Py_CLEAR(stand_ins[index]);
        }
    }
    *kept = Py_NewRef(made);
    nones_kept += count;
    return made;
}

/* Take a partition whole: its items are appended to `chunks` as (partition, list, kind). How many; 0 if it is for the
 * Python, and nothing has happened; -1 for an error. */
static Py_ssize_t
take_whole(PyObject *ready, PartitionFields *self, PyObject *chunks, Py_ssize_t most)
{
    if (whole_size(self, most) < 0) {
        return 0;
    }
    Place *places[MOST_LANES + 1];
    Py_ssize_t count = places_of(self, places);
    if (count < 0) {
        return 0;
    }
    Py_ssize_t first = PyList_GET_SIZE(chunks);
    Py_ssize_t size = 0;
    int failed = 0;
    for (Py_ssize_t index = 0; index < count && !failed; index++) {
        /* an empty list goes into each chunk, to change places with the list that is full by then */
        PyObject *kind = places[index] == &self->place ? Py_None : ((LaneFields *)places[index])->kind;
        PyObject *fresh = list_new();
        PyObject *chunk = fresh == NULL || kind == NULL ? NULL : PyTuple_Pack(3, (PyObject *)self, fresh, kind);
        failed = chunk == NULL || PyList_Append(chunks, chunk) < 0;
        Py_XDECREF(fresh);
        Py_XDECREF(chunk);
    }
    if (!failed && PyList_GET_SIZE(chunks) == first + count) {
        /* the last look */
        Py_ssize_t sum = 0;
        for (Py_ssize_t index = 0; index < count; index++) {
            PyObject *tail = places[index]->tail;
            sum += tail != NULL && PyList_CheckExact(tail) ? PyList_GET_SIZE(tail) : -1;
        }
        PyObject *next = sum == whole_size(self, most) ? PySequence_GetItem(ready, 0) : NULL;
        PyObject *popped = next == (PyObject *)self ? PyObject_CallMethodNoArgs(ready, name_popleft) : NULL;
        Py_XDECREF(next);
        if (popped != NULL) {
            Py_DECREF(popped);
            size = sum;
            self->listed = 0;
            Py_XSETREF(self->linger_step, Py_NewRef(Py_None));
            countdown_of(&self->place)->left = 0; /* its lanes have the same one */
            self->in_lanes = self->armed = 0;
            for (Py_ssize_t index = 0; index < count; index++) {
                PyObject *chunk = PyList_GET_ITEM(chunks, first + index);
                PyObject *full = places[index]->tail;
                places[index]->batch = PyList_GET_SIZE(full);
                places[index]->tail = PyTuple_GET_ITEM(chunk, 1);
                PyTuple_SET_ITEM(chunk, 1, full);
            }
            self->flight_start = self->removed;
            self->in_flight = size;
            self->removed += size;
        }
    }
    if (size == 0 && PyList_GET_SIZE(chunks) > first) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        failed |= PyList_SetSlice(chunks, first, PyList_GET_SIZE(chunks), NULL) < 0;
        PyErr_Restore(type, value, traceback);
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_DECREF(places[index]);
    }
    return failed || PyErr_Occurred() ? -1 : size;
}

/* The loop of DrainTask._take(ready, chunks, left, most, together), up to the first partition that is for the Python: how
 * many are left, how many items were taken, and the time of the oldest, or infinity. `most` bounds what is taken from
 * each, `together` what is taken from all. */
static PyObject *
take_usual(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || !Py_IS_TYPE(args[0], deque_type) || !PyList_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "ready, chunks, left, most and together are wanted");
        return NULL;
    }
    PyObject *ready = args[0], *chunks = args[1];
    Py_ssize_t left = PyLong_AsSsize_t(args[2]), most = PyLong_AsSsize_t(args[3]);
    Py_ssize_t together = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_ssize_t taken = 0;
    double oldest = Py_HUGE_VAL;
    for (; left > 0 && PyObject_Size(ready) > 0; left--) {
        PyObject *partition = PySequence_GetItem(ready, 0);
        if (partition == NULL) {
            return NULL;
        }
        Py_ssize_t size = 0;
        double since = 0.0;
        PyObject *credits = NULL;
        if (is_kind(partition, &PartitionFieldsType)) {
            PyObject *began = ((PartitionFields *)partition)->since;
            since = began != NULL && PyFloat_CheckExact(began) ? PyFloat_AS_DOUBLE(began) : 0.0;
            size = take_whole(ready, (PartitionFields *)partition, chunks, most < together ? most : together);
            credits = size > 0 ? Py_XNewRef(((PartitionFields *)partition)->credits) : NULL;
        }
        Py_DECREF(partition);
        if (credits != NULL && !is_none(credits)) { /* the items are in `chunks` by now, whatever it raises */
            PyObject *lent = PyObject_CallMethodNoArgs(credits, name_refill);
            size = lent == NULL ? -1 : size;
            Py_XDECREF(lent);
        }
        Py_XDECREF(credits);
        if (size < 0) {
            return NULL;
        }
        if (size == 0) {
            break;
        }
        taken += size;
        together -= size;
        oldest = since < oldest ? since : oldest;
    }
    return Py_BuildValue("nnd", left, taken, oldest);
}

/* Let go of the items of chunks that nobody else has. */
static void
retire_chunks(PyObject *chunks)
{
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(chunks); index++) {
        PyObject *chunk = PyList_GET_ITEM(chunks, index);
        if (Py_REFCNT(chunk) == 1 && PyTuple_CheckExact(chunk) && PyTuple_GET_SIZE(chunk) == 3) {
            PyObject *list = PyTuple_GET_ITEM(chunk, 1);
            if (PyList_CheckExact(list) && Py_REFCNT(list) == 1) {
                PyTuple_SET_ITEM(chunk, 1, Py_NewRef(Py_None));
                list_retire(list);
            }
        }
    }
}

/* The end of DrainTask._round(chunks): up to the first partition that somebody waits for, or that moves; its index. The
 * items are let go of. */
static PyObject *
finish_usual(PyObject *Py_UNUSED(module), PyObject *chunks)
{
    Py_ssize_t index = 0;
    if (PyList_CheckExact(chunks)) {
        PartitionFields *before = NULL;
        for (; index < PyList_GET_SIZE(chunks); index++) {
            PyObject *chunk = PyList_GET_ITEM(chunks, index);
            if (!PyTuple_CheckExact(chunk) || PyTuple_GET_SIZE(chunk) != 3) {
                break;
            }
            PartitionFields *partition = (PartitionFields *)PyTuple_GET_ITEM(chunk, 0);
            if (partition == before) {
                continue;
            }
            before = partition;
            if (!is_kind((PyObject *)partition, &PartitionFieldsType) || !is_none(partition->ranges)
                || !is_none(partition->leaving) || !is_none(partition->next_owner)) {
                break;
            }
            partition->in_flight = 0;
        }
        retire_chunks(chunks);
    }
    return PyLong_FromSsize_t(index);
}

/* -- by handler ------------------------------------------------------------------------------------------------------- */

static unsigned long long groupings = 0;

/* Ask for the handlers of the next chunks, and before that for the lines of the table in which they are. */
static inline void
look_ahead_chunks(PyObject *resolved, PyObject *chunks, Py_ssize_t index)
{
    TypeTable *table = (TypeTable *)resolved;
    if (!Py_IS_TYPE(resolved, &TypeTableType) || table->lines == 0 || index + 6 >= PyList_GET_SIZE(chunks)) {
        return;
    }
    PyObject *far = PyList_GET_ITEM(chunks, index + 6), *near = PyList_GET_ITEM(chunks, index + 3);
    if (PyTuple_CheckExact(far) && PyTuple_GET_SIZE(far) == 3) {
        PREFETCH(table_line(table, (PyTypeObject *)PyTuple_GET_ITEM(far, 2)));
    }
    if (PyTuple_CheckExact(near) && PyTuple_GET_SIZE(near) == 3) {
        PyObject *entry = table_known(table, (PyTypeObject *)PyTuple_GET_ITEM(near, 2));
        if (entry != NULL) {
            PREFETCH(entry);
            PREFETCH((char *)entry + LINE);
        }
    }
}

/* Dispatcher.group(resolved, chunks, most), where each chunk is of a type of its own handler, which is known: the
 * calls; None for the Python. */
static PyObject *
group_usual(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "resolved, chunks and most are wanted");
        return NULL;
    }
    PyObject *resolved = args[0], *chunks = args[1];
    Py_ssize_t most = PyLong_AsSsize_t(args[2]);
    if (most == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (!is_by_type(resolved) || !PyList_CheckExact(chunks)) {
        Py_RETURN_NONE;
    }
    PyObject *calls = PyList_New(0);
    unsigned long long mine = ++groupings;
    int usual = calls != NULL;
    for (Py_ssize_t index = 0; usual && index < PyList_GET_SIZE(chunks); index++) {
        PyObject *chunk = Py_NewRef(PyList_GET_ITEM(chunks, index));
        look_ahead_chunks(resolved, chunks, index);
        usual = PyTuple_CheckExact(chunk) && PyTuple_GET_SIZE(chunk) == 3 && PyType_Check(PyTuple_GET_ITEM(chunk, 2))
                && PyList_CheckExact(PyTuple_GET_ITEM(chunk, 1));
        if (usual) {
            PyObject *items = PyTuple_GET_ITEM(chunk, 1);
            HandlerFields *entry = (HandlerFields *)look_up(resolved, (PyTypeObject *)PyTuple_GET_ITEM(chunk, 2));
            usual = entry != NULL && is_kind((PyObject *)entry, &HandlerFieldsType) && entry->mark != mine
                    && PyList_GET_SIZE(items) <= (entry->most ? entry->most : most);
            if (usual) {
                entry->mark = mine;
                PyObject *call = PyTuple_Pack(2, (PyObject *)entry, items);
                usual = call != NULL && PyList_Append(calls, call) == 0;
                Py_XDECREF(call);
            }
            Py_XDECREF(entry);
        }
        Py_DECREF(chunk);
    }
    if (usual) {
        return calls;
    }
    Py_XDECREF(calls);
    if (PyErr_Occurred()) {
        return NULL; /* a comparison's: the Python goes on one by one, as ever */
    }
    Py_RETURN_NONE;
}

/* -- the calls ---------------------------------------------------------------------------------------------------------- */

/* What happened to a call. */
typedef enum {
    NOT_MINE,  /* nothing was done: the Python makes it */
    UNDER_WAY, /* the handler waits, or has raised: the Python goes on with it */
    ENDED,     /* it is over and counted */
    BROKEN,    /* an error of the hot path's own */
} CallState;

/* sizes[count] += 1; 0 where the number is not there. While the same number comes again and again it is only counted. */
static int
count_size(SizeFields *sizes, Py_ssize_t count)
{
    if (sizes->times > 0 && sizes->last == count) {
        sizes->times++;
        return 1;
    }
    if (sizes->exact == NULL || !PyDict_CheckExact(sizes->exact)) {
        return 0;
    }
    if (sizes->times > 0) {
        PyObject *key = PyLong_FromSsize_t(sizes->last);
        PyObject *known = key == NULL ? NULL : PyDict_GetItemWithError(sizes->exact, key);
        long long times = known != NULL && PyLong_CheckExact(known) ? PyLong_AsLongLong(known) : 0;
        PyObject *more = PyErr_Occurred() ? NULL : PyLong_FromLongLong(times + sizes->times);
        int done = more == NULL ? -1 : PyDict_SetItem(sizes->exact, key, more);
        Py_XDECREF(more);
        Py_XDECREF(key);
        if (done < 0) {
            return -1;
        }
        sizes->times = 0;
    }
    PyObject *key = PyLong_FromSsize_t(count);
    int known = key == NULL ? -1 : PyDict_Contains(sizes->exact, key);
    Py_XDECREF(key);
    if (known > 0) {
        sizes->last = count;
        sizes->times = 1;
    }
    return known;
}

/* CallLimiter.leave(drain), where nobody waits for the turn: 1, or 0 for the Python. */
static int
leave_turn(TurnFields *turns, PyObject *drain)
{
    if (!is_none(turns->waiting) || turns->holders == NULL || !PyList_CheckExact(turns->holders)) {
        return 0;
    }
    Py_ssize_t last = PyList_GET_SIZE(turns->holders) - 1;
    if (last != 0 || PyList_GET_ITEM(turns->holders, last) != drain) {
        return 0;
    }
    Py_SET_SIZE(turns->holders, 0); /* its memory stays, for the next call */
    Py_DECREF(drain);               /* not its last reference: the round has one */
    return 1;
}

/* One call: `entry.consume(items.copy())`, awaited up to its first wait. Where it has ended and nobody has kept the
 * handler's list, that is given back as `used`. */
static CallState
call_once(RoundFields *round, HandlerFields *entry, PyObject *items, CounterFields *counters, SizeFields *sizes,
          PyObject **under_way, PyObject **used)
{
    TurnFields *turns = (TurnFields *)entry->turns;
    PyObject *drain = round->drain;
    Py_ssize_t count = PyList_GET_SIZE(items);
    if (!is_none(entry->timeout) || entry->consume == NULL || turns == NULL
        || !is_kind((PyObject *)turns, &TurnFieldsType) || !is_none(turns->waiting)
        || turns->holders == NULL || !PyList_CheckExact(turns->holders)
        || PyList_GET_SIZE(turns->holders) >= turns->limit) {
        return NOT_MINE;
    }
    Py_INCREF(turns);
    Py_INCREF(drain);
    CallState state = BROKEN;
    PyObject *consume = Py_NewRef(entry->consume);
    PyObject *result = NULL, *copy = NULL;
    int counted = count_size(sizes, count);
    if (counted > 0) {
        copy = list_copy(items);
        counted = copy == NULL ? -1 : 1;
    }
    if (counted <= 0) {
        state = counted < 0 ? BROKEN : NOT_MINE;
        goto end;
    }
    if (turns->holders == NULL || !PyList_CheckExact(turns->holders) || list_append(turns->holders, drain, 0) < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "the holders of a turn are no list any more");
        }
        goto end;
    }
    PyObject *coroutine = PyObject_CallOneArg(consume, copy);
    PySendResult outcome = PYGEN_ERROR;
    if (coroutine != NULL && !PyCoro_CheckExact(coroutine)) {
        *under_way = coroutine; /* whatever it is, the Python awaits it */
        state = UNDER_WAY;
        goto end;
    }
    if (coroutine != NULL) {
        outcome = PyIter_Send(coroutine, Py_None, &result);
    }
    if (outcome == PYGEN_RETURN) {
        Py_DECREF(coroutine);
        Py_CLEAR(result);
        if (!leave_turn(turns, drain)) {
            PyObject *left = PyObject_CallMethodOneArg((PyObject *)turns, name_leave, drain);
            Py_XDECREF(left);
            if (left == NULL) {
                goto end;
            }
        }
        if (!round->abandoned) {
            counters->handled += count;
            round->pending -= count;
        }
        state = ENDED;
        if (Py_REFCNT(copy) == 1) {
            *used = copy;
            copy = NULL;
        }
    }
    else {
        /* on with it in Python, which meets there what it yielded, or raised */
        *under_way = call_begun(coroutine, outcome == PYGEN_NEXT ? result : NULL);
        result = NULL;
        state = *under_way == NULL ? BROKEN : UNDER_WAY;
    }
end:
    Py_XDECREF(result);
    Py_XDECREF(copy);
    Py_DECREF(consume);
    Py_DECREF(drain);
    Py_DECREF(turns);
    return state;
}

/* entry.durations.record(...), entry.calls, entry.items, as Dispatcher.run counts the time of a call. */
static int
count_time(RoundFields *round, HandlerFields *entry, Py_ssize_t items, PyObject *timed)
{
    if (!is_kind(round->drain, &DrainFieldsType) || ((DrainFields *)round->drain)->clock == NULL) {
        PyErr_SetString(PyExc_TypeError, "the drain task has no clock");
        return -1;
    }
    PyObject *ended = time_of((DrainFields *)round->drain);
    if (ended == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "the clock's time is no float");
        }
        return -1;
    }
    double now = PyFloat_AS_DOUBLE(ended);
    Py_DECREF(ended);
    PyObject *took = PyFloat_FromDouble(now - round->began);
    PyObject *durations = entry->durations == NULL ? NULL : Py_NewRef(entry->durations);
    PyObject *arguments[] = {durations, took, timed};
    PyObject *done = NULL;
    if (took != NULL && durations != NULL) {
        done = PyObject_VectorcallMethod(name_record, arguments, 3, NULL);
    }
    Py_XDECREF(took);
    Py_XDECREF(durations);
    if (done == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_DECREF(done);
    Py_ssize_t weight = PyLong_AsSsize_t(timed);
    entry->calls += weight;
    entry->items += items * weight;
    round->began = now;
    return 0;
}

/* Whether nothing was left in the context since it was copied: `has_left`, the other way round; -1 for an exit, say. */
static int
context_is(PyObject *before)
{
    PyObject *now = PyContext_CopyCurrent();
    int same = now == NULL ? -1 : PyObject_RichCompareBool(now, before, Py_EQ);
    Py_XDECREF(now);
    if (same < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* the values are the user's, and so is their comparison */
        same = 0;
    }
    return same;
}

/* Let go of the items of a call that has ended, while they are still in the cache: they count as None from then on, for
 * only their number is asked for, until the round has numbered its items by their types. `call` is one of the round's
 * calls, and `used` the list that its handler had, or NULL; its reference is taken. Nothing happens where the call's
 * list is not that of a chunk of the same index. */
static void
release_call(RoundFields *round, Py_ssize_t index, PyObject *call, PyObject *used)
{
    PyObject *items = PyTuple_GET_ITEM(call, 1);
    PyObject *chunks = round->chunks;
    PyObject *chunk = chunks != NULL && PyList_CheckExact(chunks) && index < PyList_GET_SIZE(chunks)
                              && PyList_GET_SIZE(chunks) == PyList_GET_SIZE(round->calls)
                          ? PyList_GET_ITEM(chunks, index)
                          : NULL;
    PyObject *stand_in = NULL;
    /* Each list is in its tuple alone, and each tuple in its list, next to the reference that the caller has. */
    if (chunk != NULL && is_none(round->numbers) && PyTuple_CheckExact(chunk) && PyTuple_GET_SIZE(chunk) == 3
        && Py_REFCNT(chunk) == 1
        && PyTuple_GET_ITEM(chunk, 1) == items && PyTuple_GET_ITEM(chunk, 2) != (PyObject *)Py_TYPE(Py_None)
        && Py_REFCNT(call) == 2 && Py_REFCNT(items) == 2) {
        stand_in = nones_of(PyList_GET_SIZE(items));
    }
    if (stand_in == NULL) {
        PyErr_Clear(); /* for want of memory they stay a little longer */
        if (used != NULL) {
            list_retire(used);
        }
        return;
    }
    PyTuple_SET_ITEM(chunk, 1, stand_in);
    PyTuple_SET_ITEM(call, 1, Py_NewRef(stand_in));
    Py_DECREF(items);
    if (used != NULL) {
        lists_retire(items, used);
    }
    else {
        list_retire(items);
    }
}

/* Ask for what the next calls need, each a step further: a call, its handler and its list, what these point to. */
static void
look_ahead_calls(PyObject *calls, Py_ssize_t index)
{
    Py_ssize_t count = PyList_GET_SIZE(calls);
    if (index + 4 < count) {
        PREFETCH(PyList_GET_ITEM(calls, index + 4));
    }
    for (Py_ssize_t far = 3; far > 0; far--) {
        PyObject *call = index + far < count ? PyList_GET_ITEM(calls, index + far) : NULL;
        if (call == NULL || !PyTuple_CheckExact(call) || PyTuple_GET_SIZE(call) != 2) {
            continue;
        }
        HandlerFields *entry = (HandlerFields *)PyTuple_GET_ITEM(call, 0);
        PyObject *items = PyTuple_GET_ITEM(call, 1);
        if (far == 3) {
            PREFETCH(entry);
            PREFETCH((char *)entry + LINE);
            PREFETCH(items);
            continue;
        }
        if (!PyList_CheckExact(items) || !is_kind((PyObject *)entry, &HandlerFieldsType)) {
            continue;
        }
        PyObject **each = ((PyListObject *)items)->ob_item;
        if (far == 2) {
            PREFETCH(each);
            PREFETCH(entry->consume);
            PREFETCH(entry->turns);
            continue;
        }
        for (Py_ssize_t item = 0; item < PyList_GET_SIZE(items) && item < 8; item++) {
            PREFETCH(each[item]);
        }
        if (entry->consume != NULL && PyFunction_Check(entry->consume)) {
            PREFETCH(((PyFunctionObject *)entry->consume)->func_closure);
        }
        if (entry->turns != NULL && is_kind(entry->turns, &TurnFieldsType)) {
            PREFETCH(((TurnFields *)entry->turns)->holders);
        }
    }
}

/* The loop of Dispatcher.run(round, counters, sizes, context, timed), from the call at `round.call_index` on.
 *
 * What it gives back is awaited by the Python: a call that is under way. Or it is `no_call`: then the Python looks for
 * itself at what `round.call_index` points to, be it a call that is not for the hot path, or the end. */
static PyObject *
call_usual(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || !is_kind(args[0], &RoundFieldsType) || !is_kind(args[1], &CounterFieldsType)
        || !is_kind(args[2], &SizeFieldsType)) {
        PyErr_SetString(PyExc_TypeError, "round, counters, sizes, context and timed are wanted");
        return NULL;
    }
    RoundFields *round = (RoundFields *)args[0];
    CounterFields *counters = (CounterFields *)args[1];
    int timed = PyObject_IsTrue(args[4]);
    if (timed < 0) {
        return NULL;
    }
    while (round->calls != NULL && PyList_CheckExact(round->calls) && round->call_index >= 0
           && round->call_index < PyList_GET_SIZE(round->calls)) {
        Py_ssize_t index = round->call_index;
        if (round->drain == NULL || !is_kind(round->drain, &DrainFieldsType)) {
            break;
        }
        PyObject *call = PyList_GET_ITEM(round->calls, index);
        if (!PyTuple_CheckExact(call) || PyTuple_GET_SIZE(call) != 2
            || !is_kind(PyTuple_GET_ITEM(call, 0), &HandlerFieldsType)
            || !PyList_CheckExact(PyTuple_GET_ITEM(call, 1))) {
            break;
        }
        Py_INCREF(call);
        HandlerFields *entry = (HandlerFields *)PyTuple_GET_ITEM(call, 0);
        PyObject *items = PyTuple_GET_ITEM(call, 1);
        Py_ssize_t size = PyList_GET_SIZE(items);
        PyObject *under_way = NULL, *used = NULL;
        look_ahead_calls(round->calls, index);
        CallState state = call_once(round, entry, items, counters, (SizeFields *)args[2], &under_way, &used);
        if (state == ENDED && timed && !round->abandoned && count_time(round, entry, size, args[4]) < 0) {
            state = BROKEN;
        }
        if (state == ENDED && !round->abandoned && round->calls != NULL && PyList_CheckExact(round->calls)) {
            round->call_index = index + 1; /* what is let go of may ask how far the round is */
            release_call(round, index, call, used);
        }
        else if (used != NULL) {
            list_retire(used);
        }
        Py_DECREF(call);
        if (state == BROKEN) {
            return NULL;
        }
        if (state == UNDER_WAY) {
            return under_way;
        }
        if (state == NOT_MINE || round->abandoned) {
            break;
        }
        round->call_index = index + 1;
        if (!is_kind(round->drain, &DrainFieldsType) || ((DrainFields *)round->drain)->disturbed) {
            break;
        }
        int same = context_is(args[3]);
        if (same < 0) {
            return NULL;
        }
        if (!same) {
            break;
        }
    }
    return Py_NewRef(no_call);
}
