// Prints its arguments and its environment: what the preloaded library must leave alone in a program that is no llama.cpp.
#include <stdio.h>

int main(int argc, char ** argv, char ** environment) {
    for (int i = 0; i < argc; i++) {
        printf("%s\n", argv[i]);
    }
    for (char ** variable = environment; *variable; variable++) {
        printf("%s\n", *variable);
    }
    return argc;
}
