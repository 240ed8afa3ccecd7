/* Memory that cannot be had: every n-th allocation fails (debug-fail-alloc), the host gets NULL and goes on. */
#include "moe.h"

#define ALLOCATIONS 12

static int failure_lines(void) {
    return log_count("ggml-moe: ", "failed");
}

/* Every n-th buffer is NULL and tells why in one line; the others are whole. */
static void every_nth(ggml_backend_buffer_type_t buft, int n) {
    ggml_backend_buffer_t buffers[ALLOCATIONS];
    for (int i = 0; i < ALLOCATIONS; i++) {
        const int before = failure_lines();
        const bool fails = (i + 1) % n == 0;
        buffers[i] = ggml_backend_buft_alloc_buffer(buft, 4096);
        CHECK((buffers[i] == NULL) == fails, "allocation %d of every %d gave %s", i + 1, n, fails ? "a buffer" : "NULL");
        CHECK(failure_lines() - before == fails, "allocation %d: %d lines", i + 1, failure_lines() - before);
        if (buffers[i] != NULL) {
            ggml_backend_buffer_clear(buffers[i], 1);
        }
    }
    for (int i = 0; i < ALLOCATIONS; i++) {
        ggml_backend_buffer_free(buffers[i]);
    }
}

/* A model and its graph under the same fault: each try ends in the right result or in a failure, never in a crash. */
static void model_survives(ggml_backend_reg_t reg, int n) {
    ggml_backend_dev_t dev = device_number(reg, 0);
    struct moe_place place[MOE_LAYERS];
    moe_place_all(place, ggml_backend_dev_buffer_type(dev), expert_buffer_type(reg, dev));
    struct moe_model model;
    bool loaded = false;
    for (int i = 0; i < 4 && !loaded; i++) {
        loaded = moe_model_try(&model, GGML_TYPE_Q8_0, place);
    }
    if (!loaded) { /* a model needs two allocations of each kind: with n = 1 or 2 there is never one */
        CHECK(n <= 2, "the model was never loaded although %d of %d allocations work", n - 1, n);
        return;
    }
    float * wanted = moe_reference(GGML_TYPE_Q8_0, 3, MOE_USED, 1, 9);
    int right = 0, failed = 0;
    for (int i = 0; i < 12; i++) {
        ggml_backend_t moe = ggml_backend_dev_init(dev, NULL);
        if (moe == NULL) {
            failed++;
            continue;
        }
        set_threads(moe, 1);
        enum ggml_status status;
        float * got = moe_run(moe, place[0].dense, &model, 3, MOE_USED, 9, &status);
        if (got != NULL) {
            moe_same(got, wanted, 3, "under allocation faults");
            free(got);
            right++;
        } else {
            CHECK(status == GGML_STATUS_ALLOC_FAILED || status == GGML_STATUS_FAILED, "status %d", status);
            failed++;
        }
        ggml_backend_free(moe);
    }
    printf("every %d: %d right, %d failed\n", n, right, failed);
    CHECK(right > 0 || n <= 2, "no run succeeded");
    free(wanted);
    moe_model_free(&model);
}

void case_fail_device(const char * argument) {
    const int n = atoi(argument);
    ggml_backend_reg_t reg = load_plugin();
    every_nth(ggml_backend_dev_buffer_type(device_number(reg, 0)), n);
    model_survives(reg, n);
}

void case_fail_host(const char * argument) {
    const int n = atoi(argument);
    ggml_backend_reg_t reg = load_plugin();
    every_nth(expert_buffer_type(reg, device_number(reg, 0)), n);
    model_survives(reg, n);
}
