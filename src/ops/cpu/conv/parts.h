// What the CPU side's convolutions share: a convolution with every padding spelt out, and the ways
// to compute it. Included inside WEFT_CPU_BEGIN/END, by tests of both sides twice.

// Floats of the arena until the operation's end; while planning they are taken too, and nothing may
// be written.
static inline Tensor floats(std::int64_t n) { return Tensor::empty({n}, DType::f32); }

// x [n,t,h,w,cin] -> y [n,to,ho,wo,cout], weights [cout,cin/groups,kt,kh,kw].
struct Geometry {
  std::int64_t n, t, h, w, cin, cout, to, ho, wo;
  std::int64_t kt, kh, kw, stride_t, stride;
  std::int64_t front, back, top, bottom, left,
      right;  // zeros; those after the last may be negative
  std::int64_t dilation = 1, groups = 1;
  auto operator<=>(const Geometry&) const = default;

  std::int64_t x_numel() const { return n * t * h * w * cin; }
  std::int64_t y_numel() const { return n * to * ho * wo * cout; }
  std::int64_t w_numel() const { return cout * (cin / groups) * kt * kh * kw; }
  double flops() const {
    return 2.0 * static_cast<double>(y_numel() * (cin / groups) * kt * kh * kw);
  }
};

Geometry geometry(const Shape& x, const Shape& y, const Conv& c);

// A batch is computed in passes of as many samples as have so many values together in their larger
// tensor: those in bf16, which are converted to f32, and upsampled ones, which are enlarged. Sums
// over a batch (the weights' gradient) are added up pass by pass; all else is the same in any
// number of passes. A variable, so that tests may set less.
extern std::int64_t values_per_pass;

// The forward with flipped weights that makes the gradient of x, where there is one.
std::optional<Geometry> flipped_geometry(const Geometry& g);

// y = conv(x) + bias, or y += conv(x) + bias where `add`. bias may be null.
void direct_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                    float* y);
// dx = the gradient of x.
void direct_backward_input(const Geometry& g, const float* dy, const float* w, float* dx);
// dw (+)= the gradient of w.
void direct_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                            bool accumulate);

// kt x 3 x 3 of stride 1 in the plane, dilated or not, with channels enough to pay for the
// transforms (winograd.cpp).
bool winograd_fits(const Geometry& g);
void winograd_forward(const Geometry& g, const float* x, const float* w, const float* bias,
                      bool add, float* y);
// Those of three frames, of stride 1 among the frames too (winograd_volume.cpp).
bool volume_fits(const Geometry& g);
void volume_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                    float* y);
// Planes of so many channels that their transformed weights would not stay in a cache
// (winograd_volume.cpp): winograd_forward calls this for them, in small batches. The bits of a
// sample are the same either way.
bool wide_fits(const Geometry& g);
void wide_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                  float* y);
void winograd_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                              bool accumulate);

// Kernels of 5x5 to 9x9, of any number of frames (fourier.cpp).
bool fourier_fits(const Geometry& g);
void fourier_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                     float* y);

// At least 32 input and 8 output channels, any stride and dilation (blocked.cpp).
bool blocked_fits(const Geometry& g);
void blocked_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                     float* y);

// What computes the forward of g: the first that fits, in this order (conv.cpp).
enum class Algorithm { winograd_volume, winograd, fourier, blocked, direct };
Algorithm algorithm_of(const Geometry& g);

// The same by that algorithm. A backward of stride 1 is a forward with flipped weights.
void plain_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                   float* y);
void plain_backward_input(const Geometry& g, const float* dy, const float* w, float* dx, bool add);
void plain_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                           bool accumulate);
// to [in,out/groups,kt,kh,kw] = w [out,in/groups,kt,kh,kw], the kernel turned round.
void turn_weights(const Geometry& g, const float* w, float* to);

// A kernel of its own for each channel; f32 or bf16 as they come.
bool is_depthwise(const Shape& x, std::int64_t cout, const Conv& c);
void depthwise_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                       const Conv& c, Tensor& y);
void depthwise_backward_input(const Tensor& dy, const Tensor& w, const Conv& c, Tensor& dx,
                              bool accumulate);
void depthwise_backward_weight(const Tensor& x, const Tensor& dy, const Conv& c, Tensor& dw,
                               bool accumulate);
