/* Many items at once: put in, sorted by type or by key, or moved from list to list. Included once, by hotpath.c. */

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
