/*
 * What no correct host does, and what must not bring a host down: NULL and foreign handles in every slot, and a panic in
 * every slot (debug-panic).
 */
#include "slots.h"

/* Worlds stay: what a failing slot should have freed must still be found when the process ends, or it counts as a leak. */
static struct world worlds[2];

/* The real objects of a world, over the default buffer type or the one for experts. Objects whose slot fails stay NULL. */
static struct world make_world(ggml_backend_reg_t reg, bool experts) {
    struct world w = { .reg_i = reg->iface, .reg = reg, .ours = true, .experts = experts, .text = "ggml_backend_get_features" };
    w.device = reg->iface.get_device(reg, 0);
    void * (*proc)(ggml_backend_reg_t, const char *) = reg->iface.get_proc_address;
    w.get_extra_bufts = (ggml_backend_dev_get_extra_bufts_t) proc(reg, "ggml_backend_dev_get_extra_bufts");
    w.set_n_threads = (ggml_backend_set_n_threads_t) proc(reg, "ggml_backend_set_n_threads");
    w.set_abort_callback = (ggml_backend_set_abort_callback_t) proc(reg, "ggml_backend_set_abort_callback");
    w.get_features = (ggml_backend_get_features_t) proc(reg, "ggml_backend_get_features");
    if (w.device == NULL) {
        return w;
    }
    w.device_i = w.device->iface;
    w.backend = w.device_i.init_backend(w.device, NULL);
    if (w.backend != NULL) {
        w.backend_i = w.backend->iface;
    }
    w.event = w.device_i.event_new != NULL ? w.device_i.event_new(w.device) : NULL;
    ggml_backend_buffer_type_t * extra = experts && w.get_extra_bufts != NULL ? w.get_extra_bufts(w.device) : NULL;
    w.buffer_type = experts ? (extra != NULL ? extra[0] : NULL) : w.device_i.get_buffer_type(w.device);
    if (w.buffer_type == NULL) {
        return w;
    }
    w.buffer_type_i = w.buffer_type->iface;
    w.buffer = w.buffer_type_i.alloc_buffer(w.buffer_type, 4096);
    if (w.buffer == NULL) {
        return w;
    }
    w.buffer_i = w.buffer->iface;

    w.ctx = new_context(8);
    w.tensor = ggml_new_tensor_1d(w.ctx, GGML_TYPE_F32, 64);
    w.other = ggml_add(w.ctx, w.tensor, w.tensor);
    w.data = calloc(1, 4096);
    uint8_t * base = w.buffer_i.get_base(w.buffer);
    if (base != NULL) {
        w.tensor->data = base;
        w.other->data = base + 1024;
        w.tensor->buffer = w.other->buffer = w.buffer;
    }
    w.graph = ggml_new_graph(w.ctx);
    ggml_build_forward_expand(w.graph, w.other);
#if HOST_HAS_PARAMS
    static struct ggml_backend_graph_optimize_params optimize;
    w.optimize = &optimize;
#endif
    return w;
}

/* NULL. */

/* Calls every slot with a copy of a world from which a part was taken. */
static void call_all(const struct world * whole, bool handles, bool operands) {
    for (size_t i = 0; i < N_SLOTS; i++) {
        struct world w = *whole;
        if (!handles) {
            w.ours = false;
            w.reg = NULL, w.device = NULL, w.buffer_type = NULL, w.buffer = NULL, w.backend = NULL, w.event = NULL;
        }
        if (!operands) {
            w.text = NULL, w.tensor = NULL, w.other = NULL, w.data = NULL, w.graph = NULL, w.optimize = NULL, w.event = NULL;
        }
        if (SLOTS[i].present(&w) && (!handles || SLOTS[i].has_operands)) {
            check_failure(SLOTS[i].name, SLOTS[i].call(&w));
        }
    }
}

void case_null(void) {
    ggml_backend_reg_t reg = load_plugin();
    for (int experts = 0; experts < 2; experts++) {
        const struct world * w = &worlds[experts];
        worlds[experts] = make_world(reg, experts);
        CHECK(w->backend != NULL && w->buffer != NULL, "no world");
        call_all(w, false, true);
        call_all(w, false, false);
        CHECK(log_count("ggml-moe: ", "null") > 0, "nothing was said");
        if (!experts) {
            CHECK(w->backend_i.graph_compute(w->backend, w->graph) == GGML_STATUS_SUCCESS, "no graph after NULL handles");
        }
    }
    for (int experts = 0; experts < 2; experts++) {
        const struct world * w = &worlds[experts];
        call_all(w, true, false);
        /* The device's bytes may be wrong now, so a graph may be refused; it may not crash. */
        const enum ggml_status status = w->backend_i.graph_compute(w->backend, w->graph);
        CHECK(status == GGML_STATUS_SUCCESS || status == GGML_STATUS_FAILED, "status %d", status);
        ggml_backend_free(w->backend);
        ggml_backend_buffer_free(w->buffer);
    }
}

/* Objects of the stock CPU backend in our slots. */
void case_foreign(void) {
    ggml_backend_reg_t reg = load_plugin();
    const struct world whole = worlds[0] = make_world(reg, false);
    struct world w = whole;
    w.ours = false;
    w.device = cpu_device();
    w.reg = ggml_backend_dev_backend_reg(w.device);
    w.buffer_type = ggml_backend_dev_buffer_type(w.device);
    w.buffer = ggml_backend_buft_alloc_buffer(w.buffer_type, 4096);
    w.backend = ggml_backend_dev_init(w.device, NULL);
    static struct ggml_backend_event event;
    w.event = &event;
    event.device = w.device;
    for (size_t i = 0; i < N_SLOTS; i++) {
        if (SLOTS[i].present(&w)) {
            check_failure(SLOTS[i].name, SLOTS[i].call(&w));
        }
    }
    ggml_backend_free(w.backend);
    ggml_backend_buffer_free(w.buffer);
    CHECK(ggml_backend_graph_compute(whole.backend, whole.graph) == GGML_STATUS_SUCCESS, "no graph afterwards");
    ggml_backend_free(whole.backend);
    ggml_backend_buffer_free(whole.buffer);
}

/* Accesses past the end of a buffer, which ggml's own checks do not stop when a slot is called directly. */
void case_bounds(void) {
    ggml_backend_reg_t reg = load_plugin();
    for (int experts = 0; experts < 2; experts++) {
        const struct world * w = &worlds[experts];
        worlds[experts] = make_world(reg, experts);
        const struct ggml_backend_buffer_i * i = &w->buffer_i;
        const size_t past[] = { 4096 - 16, 4096, (size_t) 1 << 40, SIZE_MAX - 64 };
        for (size_t k = 0; k < sizeof(past) / sizeof(past[0]); k++) {
            uint8_t data[64];
            log_forget();
            i->set_tensor(w->buffer, w->tensor, data, past[k], 32);
            i->memset_tensor(w->buffer, w->tensor, 1, past[k], 32);
#if HOST_HAS_ROWS
            i->set_tensor_2d(w->buffer, w->tensor, data, 0, 32, 2, past[k], 32);
#endif
            memset(data, 0xab, sizeof(data));
            i->get_tensor(w->buffer, w->tensor, data, past[k], 32);
            CHECK(data[0] == 0 && data[31] == 0 && data[32] == 0xab, "a refused read must give zeros");
#if HOST_HAS_ROWS
            i->get_tensor_2d(w->buffer, w->tensor, data, 0, 32, 2, past[k], 32);
#endif
            CHECK(log_count("ggml-moe: buffer.", "outside") == (HOST_HAS_ROWS ? 5 : 3), "offset %zu: each refusal must be told", past[k]);
        }
        CHECK(w->backend_i.graph_compute(w->backend, w->graph) == GGML_STATUS_FAILED, "a graph ran over lost writes");
        ggml_backend_free(w->backend);
        ggml_backend_buffer_free(w->buffer);
    }
}

/* Panics. */

typedef const char ** (*slot_names_t)(void);

/* Prints the slots that can be made to panic, and checks that none is missing. */
void case_slots(void) {
    ggml_backend_reg_t reg = load_plugin();
    void * proc = ggml_backend_reg_get_proc_address(reg, "ggml_moe_slot_names");
    CHECK(proc != NULL, "the plugin does not name its slots");
    const char ** names = ((slot_names_t) proc)();
    CHECK(names != NULL, "no names");
    const struct world w = worlds[0] = make_world(reg, false);
    for (size_t i = 0; i < N_SLOTS; i++) {
        bool named = false;
        for (const char ** name = names; *name != NULL; name++) {
            named = named || strcmp(*name, SLOTS[i].name) == 0;
        }
        CHECK(named || !SLOTS[i].present(&w), "%s is not behind the boundary", SLOTS[i].name);
    }
    for (const char ** name = names; *name != NULL; name++) {
        const struct slot * slot = find_slot(*name);
        CHECK(slot != NULL || strcmp(*name, "entry.init") == 0, "%s is unknown to slots.c", *name);
        /* Slots that the inner backend lacks are left empty, so that ggml's own defaults apply; older layouts lack some. */
        const bool empty = slot != NULL && !slot->present(&w);
        const bool lacks = slot != NULL && slot->call == NULL;
        CHECK(!empty || lacks || strncmp(*name, "backend.", 8) == 0, "%s is empty", *name);
        printf("%s %s\n", empty ? "empty" : "slot", *name);
    }
    ggml_backend_free(w.backend);
    ggml_backend_buffer_free(w.buffer);
}

/* The entry point panics: ggml sees NULL. The first call may come before the key is read. */
static void panic_in_init(void) {
    if (ggml_backend_load(plugin_path()) != NULL) {
        CHECK(ggml_backend_load(plugin_path()) == NULL, "ggml_backend_init survived");
    }
    CHECK(log_count("ggml-moe: panic in entry.init: ", NULL) == 1, "the panic was not reported");
}

void case_panic(const char * name) {
    if (strcmp(name, "entry.init") == 0) {
        panic_in_init();
        return;
    }
    const struct slot * slot = find_slot(name);
    CHECK(slot != NULL, "%s is unknown to slots.c", name);
    char line[128];
    snprintf(line, sizeof(line), "ggml-moe: panic in %s: ", name);
    ggml_backend_reg_t reg = load_plugin();

    for (int experts = 0; experts < 2; experts++) {
        struct world w = worlds[experts] = make_world(reg, experts);
        static struct ggml_backend_event event;
        if (w.event == NULL) {
            w.event = &event;
            event.device = w.device;
        }
        if (!slot->present(&w)) {
            /* The object that holds the slot comes from a slot that panics itself, or is not needed for experts. */
            CHECK(experts, "%s cannot be reached", name);
            continue;
        }
        if (w.data != NULL) {
            memset(w.data, 0xab, 4096);
        }
        log_forget();
        check_failure(name, slot->call(&w));
        const int lines = log_count(line, NULL);
        CHECK(lines == 1 || (lines == 2 && strstr(name, "get_memory")) || (lines == 2 && strstr(name, "get_alloc_size_n")),
              "%d lines report the panic", lines);

        if (strcmp(name, "buffer.get_tensor") == 0 || strcmp(name, "backend.get_tensor_async") == 0) {
            for (size_t i = 0; i < 64 * sizeof(float); i++) {
                CHECK(((uint8_t *) w.data)[i] == 0, "byte %zu of a failed read is not zero", i);
            }
        }
        if (strcmp(name, "buffer.get_tensor_2d") == 0) {
            for (size_t i = 0; i < 4 * 16; i++) {
                CHECK(((uint8_t *) w.data)[i] == (i % 16 < 8 ? 0 : 0xab), "byte %zu of a failed 2-D read", i);
            }
        }
        const struct slot * compute = find_slot("backend.graph_compute");
        if (w.backend != NULL && w.graph != NULL && !experts && slot != compute && strcmp(name, "backend.free") != 0 &&
            strcmp(name, "buffer.get_base") != 0 && strcmp(name, "buffer.free_buffer") != 0) {
            const enum ggml_status status = w.backend_i.graph_compute(w.backend, w.graph);
            /* A device that missed a write must not compute with what is there. */
            const enum ggml_status wanted = slot->poisons ? GGML_STATUS_FAILED : GGML_STATUS_SUCCESS;
            CHECK(status == wanted, "the next graph_compute gave %d", status);
        }
        if (w.backend != NULL && strcmp(name, "backend.free") != 0) {
            w.backend_i.free(w.backend);
        }
    }
}
