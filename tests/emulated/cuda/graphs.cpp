// Capture and graphs: the copies and fills of a captured stream are done again at each launch.
#include <algorithm>

#include "emulated.h"

using namespace emulated;

namespace {
struct Graph {
  std::vector<Op> ops;
};
Graph* graph_of(void* handle) { return static_cast<Graph*>(handle); }
}  // namespace

namespace emulated {
struct Capture {
  unsigned long long number;
  Graph* graph;
  std::vector<Stream*> streams;
};
void captured(Capture* capture, Op op) { capture->graph->ops.push_back(std::move(op)); }
void join(Capture* capture, Stream* s) {
  s->capture = capture;
  capture->streams.push_back(s);
}
}  // namespace emulated

static void begin(Stream* s, Graph* graph) {
  static unsigned long long number = 0;
  join(new Capture{++number, graph, {}}, s);
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  LOCK;
  return begin(stream_of(stream), new Graph), cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  LOCK;
  Capture* capture = stream_of(stream)->capture;
  if (!capture) return failed(cudaErrorIllegalState);
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  for (Stream* s : capture->streams) s->capture = nullptr;
  delete capture;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  LOCK;
  *status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                         size_t* n) {
  LOCK;
  const Capture* capture = stream_of(stream)->capture;
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (capture && number) *number = capture->number;
  if (capture && graph) *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  LOCK;
  return *n = std::max<size_t>(1, graph_of(graph)->ops.size()), cudaSuccess;  // kernels are not ops here, but torch asks for some
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  LOCK;
  return *out = reinterpret_cast<cudaGraphExec_t>(new Graph(*graph_of(graph))), cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  LOCK;
  count("cudaGraphLaunch");
  for (const Op& op : graph_of(graph)->ops) enqueue(stream_of(stream), op, 2e-6, {}, "graph");
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph_of(graph), cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete graph_of(graph), cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return *mode = cudaStreamCaptureModeRelaxed, cudaSuccess;
}
