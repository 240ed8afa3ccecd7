/* Loading and unloading, as ggml_backend_load_all and a host that reloads its plugins do it. */
#include "host.h"

static void expect_devices(size_t stock, bool ours) {
    CHECK(ggml_backend_dev_count() == stock + ours, "%zu devices", ggml_backend_dev_count());
    CHECK((ggml_backend_dev_by_name("MoE0") != NULL) == ours, "MoE0 is %s", ours ? "missing" : "still listed");
    /* The host's own choice must not change while the plugin is there: MoE0 is used only when it is named. */
    CHECK(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) == NULL, "MoE0 over the CPU must not count as a GPU");
    CHECK(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_IGPU) == NULL, "MoE0 must not count as an integrated GPU");
    cpu_device(); /* still the stock one */
}

void case_load(void) {
    const size_t stock = ggml_backend_dev_count();
    const size_t regs = ggml_backend_reg_count();
    ggml_backend_reg_t first = NULL;
    for (int round = 0; round < 3; round++) {
        ggml_backend_reg_t reg = load_plugin();
        CHECK(first == NULL || reg == first, "round %d gave another reg", round);
        first = reg;
        CHECK(ggml_backend_reg_count() == regs + 1, "%zu regs", ggml_backend_reg_count());
        expect_devices(stock, true);
        CHECK(device_number(reg, 0) == ggml_backend_dev_by_name("MoE0"), "the listed device is not the reg's");
        ggml_backend_unload(reg);
        CHECK(ggml_backend_reg_count() == regs, "%zu regs", ggml_backend_reg_count());
        expect_devices(stock, false);
    }
}

/* A second load without an unload: ggml calls init again and knows the plugin by the reg's address. */
void case_load_again(void) {
    const size_t stock = ggml_backend_dev_count();
    ggml_backend_reg_t reg = load_plugin();
    CHECK(reg == load_plugin(), "the second load gave another reg");
    expect_devices(stock, true);

    /* Still whole after the host dropped its second handle of the library. */
    ggml_backend_t backend = ggml_backend_dev_init(device_number(reg, 0), NULL);
    CHECK(backend != NULL, "no backend");
    CHECK(strcmp(ggml_backend_name(backend), "MoE0") == 0, "the backend's name is %s", ggml_backend_name(backend));
    ggml_backend_free(backend);
    ggml_backend_unload(reg);
    expect_devices(stock, false);
}
