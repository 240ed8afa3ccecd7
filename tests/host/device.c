/* What a device and its buffer types say about themselves. */
#include "host.h"

static void check_device(ggml_backend_reg_t reg, size_t index) {
    char name[16];
    char experts[32];
    snprintf(name, sizeof(name), "MoE%zu", index);
    snprintf(experts, sizeof(experts), "MoE%zu_Experts", index);

    ggml_backend_dev_t dev = device_number(reg, index);
    CHECK(ggml_backend_dev_backend_reg(dev) == reg, "the device has another reg");
    CHECK(strcmp(ggml_backend_dev_name(dev), name) == 0, "the device's name is %s", ggml_backend_dev_name(dev));
    CHECK(strlen(ggml_backend_dev_description(dev)) > 0, "no description");
    /* Over a device without a PCI address, on a machine without a GPU, llama.cpp would take any kind of GPU by itself: only a
     * process that names MoE0 sees one. */
    const bool named = getenv("LLAMA_ARG_DEVICE") != NULL;
    const enum ggml_backend_dev_type type = named ? GGML_BACKEND_DEVICE_TYPE_IGPU : GGML_BACKEND_DEVICE_TYPE_CPU;
    CHECK(ggml_backend_dev_type(dev) == type, "type %d", ggml_backend_dev_type(dev));

    size_t free_bytes = 1, total_bytes = 0;
    ggml_backend_dev_memory(dev, &free_bytes, &total_bytes);
    CHECK(free_bytes > 0 && free_bytes <= total_bytes, "%zu of %zu bytes free", free_bytes, total_bytes);

    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    CHECK(props.name != NULL && strcmp(props.name, name) == 0, "props.name is %s", props.name ? props.name : "NULL");
    CHECK(props.description != NULL && strlen(props.description) > 0, "props.description is empty");
    CHECK(props.type == type, "props.type %d", props.type);
    CHECK(props.device_id == NULL, "a device over the CPU has a PCI address: %s", props.device_id);
    CHECK(props.memory_total == total_bytes && props.memory_free > 0, "props report other memory");
#if HOST_HAS_ROWS
    CHECK(!props.caps.mmap_support, "mmap_support would make llama.cpp map the file beside our copy");
#endif
    CHECK(!props.caps.buffer_from_host_ptr || dev->iface.buffer_from_host_ptr != NULL, "a capability without its slot");
    CHECK(!props.caps.events || dev->iface.event_new != NULL, "a capability without its slot");

    ggml_backend_buffer_type_t plain = ggml_backend_dev_buffer_type(dev);
    CHECK(plain != NULL && strcmp(ggml_backend_buft_name(plain), name) == 0, "the default buffer type's name");
    CHECK(plain == ggml_backend_dev_buffer_type(dev), "the buffer type changes between calls");
    CHECK(!ggml_backend_buft_is_host(plain), "the default buffer type must not pass for host memory");
    ggml_backend_buffer_type_t expert = expert_buffer_type(reg, dev);
    CHECK(strcmp(ggml_backend_buft_name(expert), experts) == 0, "the expert buffer type's name");
    CHECK(ggml_backend_buft_is_host(expert), "the expert buffer type is host memory");

    ggml_backend_buffer_type_t both[] = { plain, expert };
    for (int i = 0; i < 2; i++) {
        const size_t alignment = ggml_backend_buft_get_alignment(both[i]);
        CHECK(alignment >= 16 && (alignment & (alignment - 1)) == 0, "alignment %zu", alignment);
        CHECK(ggml_backend_buft_get_max_size(both[i]) >= ((size_t) 1 << 30), "max size");
        CHECK(ggml_backend_buft_get_device(both[i]) == dev, "the buffer type names another device");
        CHECK(ggml_backend_dev_supports_buft(dev, both[i]), "the device refuses its own buffer type");
        CHECK(!ggml_backend_dev_supports_buft(cpu_device(), plain), "the CPU must not read our default buffers");
    }
    ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(dev);
    CHECK(host == NULL || ggml_backend_buft_is_host(host), "the host buffer type is not host memory");
}

static void check_reg(ggml_backend_reg_t reg) {
    CHECK(reg->api_version == GGML_BACKEND_API_VERSION, "api version %d", reg->api_version);
    CHECK(strlen(ggml_backend_reg_name(reg)) > 0, "the reg has no name");
    CHECK(ggml_backend_reg_get_proc_address(reg, "no_such_proc") == NULL, "an unknown proc was found");
    ggml_backend_get_features_t features =
        (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    CHECK(features != NULL, "no features proc");
    struct ggml_backend_feature * list = features(reg);
    CHECK(list != NULL, "no features");
    for (; list->name != NULL; list++) {
        CHECK(list->value != NULL, "feature %s has no value", list->name);
    }
}

void case_device(void) {
    ggml_backend_reg_t reg = load_plugin();
    check_reg(reg);
    CHECK(ggml_backend_reg_dev_count(reg) == 1, "%zu devices", ggml_backend_reg_dev_count(reg));
    CHECK(reg->iface.get_device(reg, 1) == NULL, "a device past the end");
    check_device(reg, 0);

    /* Backends come and go; two may live at once. */
    ggml_backend_t a = ggml_backend_dev_init(device_number(reg, 0), NULL);
    ggml_backend_t b = ggml_backend_dev_init(device_number(reg, 0), "");
    CHECK(a != NULL && b != NULL && a != b, "two backends of one device");
    CHECK(ggml_backend_get_device(a) == device_number(reg, 0), "the backend names another device");
    CHECK(strcmp(ggml_backend_name(a), "MoE0") == 0, "the backend's name is %s", ggml_backend_name(a));
    CHECK(ggml_backend_guid(a) != NULL && ggml_guid_matches(ggml_backend_guid(a), ggml_backend_guid(b)), "guid");
    ggml_backend_synchronize(a);
    ggml_backend_free(a);
    ggml_backend_synchronize(b);
    ggml_backend_free(b);

    /* Events, where the device has them. */
    ggml_backend_event_t event = ggml_backend_event_new(device_number(reg, 0));
    if (event != NULL) {
        ggml_backend_t backend = ggml_backend_dev_init(device_number(reg, 0), NULL);
        ggml_backend_event_record(event, backend);
        ggml_backend_event_wait(backend, event);
        ggml_backend_event_synchronize(event);
        ggml_backend_event_free(event);
        ggml_backend_free(backend);
    }
}

/* inner=CPU,CPU */
void case_two_devices(void) {
    ggml_backend_reg_t reg = load_plugin();
    CHECK(ggml_backend_reg_dev_count(reg) == 2, "%zu devices", ggml_backend_reg_dev_count(reg));
    check_device(reg, 0);
    check_device(reg, 1);
    ggml_backend_dev_t first = device_number(reg, 0), second = device_number(reg, 1);
    CHECK(first != second, "one device twice");
    CHECK(ggml_backend_dev_by_name("MoE1") == second, "MoE1 is not the second device");
    CHECK(!ggml_backend_dev_supports_buft(first, ggml_backend_dev_buffer_type(second)),
          "a device must not take another device's memory for its own");
}
