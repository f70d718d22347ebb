// Modules, functions, launches and graphs. A launch takes the settings' time on its stream, and computes nothing.
#include "card.h"

#include <string.h>

#include <vector>

namespace {

struct Function {
    std::string name;
};

// A module needs no state: every function that XLA asks for is there.
template <typename Handle>
CUresult make_module(Handle* module) {
    RETURN_FAULT;
    *module = reinterpret_cast<Handle>(new char);
    return CUDA_SUCCESS;
}

const std::string& name_of(CUfunction function) { return reinterpret_cast<Function*>(function)->name; }

CUresult launch(CUstream handle, const char* kind, int64_t kernels, const std::string& name) {
    RETURN_FAULT;
    Stream& stream = stream_of(handle);
    enqueue(stream, [=, &stream] {
        double start = time_of(stream);
        for (int64_t kernel = 0; kernel < kernels && !fault(); ++kernel) note_launch();
        time_of(stream) += kernels * cards()->kernel_ns * 1e-9;
        sleep_until(time_of(stream));
        record(start, kind, kernels, number_of(stream), name.c_str());
    });
    return CUDA_SUCCESS;
}

}  // namespace

API CUresult cuModuleLoadData(CUmodule* module, const void*) { return make_module(module); }
API CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    return make_module(module);
}
API CUresult cuModuleLoadFatBinary(CUmodule* module, const void*) { return make_module(module); }
API CUresult cuModuleUnload(CUmodule module) {
    delete reinterpret_cast<char*>(module);
    return CUDA_SUCCESS;
}
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    RETURN_FAULT;
    *function = reinterpret_cast<CUfunction>(new Function{name});
    return CUDA_SUCCESS;
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule, const char*) {
    // Constants of all modules lie here: nothing reads them.
    alignas(256) static char constants[64 << 20];
    *address = reinterpret_cast<CUdeviceptr>(constants);
    if (bytes) *bytes = sizeof constants;
    return CUDA_SUCCESS;
}
API CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
    *mode = CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}
API CUresult cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*,
                               void**, unsigned) {
    return make_module(library);
}
API CUresult cuLibraryUnload(CUlibrary) { return CUDA_SUCCESS; }
API CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
    return cuModuleGetFunction(reinterpret_cast<CUfunction*>(kernel), nullptr, name);
}
API CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
}
API CUresult cuFuncGetName(const char** name, CUfunction function) {
    *name = name_of(function).c_str();
    return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            *value = 1024;
            break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS:
            *value = 64;
            break;
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
            *value = 90;
            break;
        default:
            *value = 0;
    }
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
    *blocks = 2;
    return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction, int, size_t, unsigned) {
    *blocks = 2;
    return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream stream, void**, void**) {
    return launch(stream, "kernel", 1, name_of(function));
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
    return launch(config->hStream, "kernel", 1, name_of(function));
}

// --- graphs: XLA's command buffers ------------------------------------------------------------------------------------

namespace {

struct Graph {
    int64_t kernels = 0;
    int64_t nodes = 0;
};

Graph* graph_of(CUgraph graph) { return reinterpret_cast<Graph*>(graph); }

CUresult add_node(CUgraphNode* node, CUgraph graph, int64_t kernels) {
    RETURN_FAULT;
    graph_of(graph)->kernels += kernels;
    *node = reinterpret_cast<CUgraphNode>(++graph_of(graph)->nodes);
    return CUDA_SUCCESS;
}

}  // namespace

API CUresult cuGraphCreate(CUgraph* graph, unsigned) {
    *graph = reinterpret_cast<CUgraph>(new Graph);
    return fault();
}
API CUresult cuGraphDestroy(CUgraph graph) {
    delete graph_of(graph);
    return CUDA_SUCCESS;
}
API CUresult cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode*, size_t,
                                     const CUDA_KERNEL_NODE_PARAMS*) {
    return add_node(node, graph, 1);
}
API CUresult cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode*, const CUgraphEdgeData*, size_t,
                               CUgraphNodeParams*) {
    return add_node(node, graph, 1);
}
API CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode*, size_t) {
    return add_node(node, graph, 0);
}
API CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode*, size_t, const CUDA_MEMCPY3D*,
                                  CUcontext) {
    return add_node(node, graph, 0);
}
API CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode*, size_t,
                                  const CUDA_MEMSET_NODE_PARAMS*, CUcontext) {
    return add_node(node, graph, 0);
}
API CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode*, size_t, CUgraph child) {
    return add_node(node, graph, graph_of(child)->kernels);
}
API CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
    RETURN_FAULT;
    *executable = reinterpret_cast<CUgraphExec>(new Graph(*graph_of(graph)));
    return CUDA_SUCCESS;
}
API CUresult cuGraphInstantiate_v2(CUgraphExec* executable, CUgraph graph, CUgraphNode*, char*, size_t) {
    return cuGraphInstantiateWithFlags(executable, graph, 0);
}
API CUresult cuGraphExecDestroy(CUgraphExec executable) {
    delete reinterpret_cast<Graph*>(executable);
    return CUDA_SUCCESS;
}
API CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    return launch(stream, "graph", reinterpret_cast<Graph*>(executable)->kernels, "");
}
API CUresult cuGraphExecUpdate_v2(CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo* result) {
    if (result) result->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    return fault();
}
API CUresult cuGraphUpload(CUgraphExec, CUstream) { return fault(); }
API CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS*) {
    record(now(), "graph-update", 1, 0, "");
    return fault();
}
API CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_MEMCPY3D*, CUcontext) {
    return fault();
}
API CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_MEMSET_NODE_PARAMS*, CUcontext) {
    return fault();
}
API CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec, CUgraphNode, CUgraph) { return fault(); }
API CUresult cuGraphKernelNodeSetAttribute(CUgraphNode, CUlaunchAttributeID, const CUlaunchAttributeValue*) {
    return fault();
}
API CUresult cuGraphNodeSetEnabled(CUgraphExec, CUgraphNode, unsigned) { return fault(); }
API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode*, size_t* count) {
    *count = graph_of(graph)->nodes;
    return CUDA_SUCCESS;
}
API CUresult cuGraphNodeGetType(CUgraphNode, CUgraphNodeType* type) {
    *type = CU_GRAPH_NODE_TYPE_KERNEL;
    return CUDA_SUCCESS;
}
API CUresult cuGraphExecGetFlags(CUgraphExec, cuuint64_t* flags) {
    *flags = 0;
    return CUDA_SUCCESS;
}
API CUresult cuGraphDebugDotPrint(CUgraph, const char*, unsigned) { return CUDA_SUCCESS; }
