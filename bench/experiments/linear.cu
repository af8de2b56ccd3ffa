// First tries at y = x W^T for batch 1 with W as encoded rows ([codes][fp32 scales], docs/format.md), x and y in bf16.
// Compiled at run time by bench/experiments/linear_cuda.py; not part of the library.
//
// INT8:  int8:block=row. A warp takes ROWS rows at a time, x lies in shared memory as fp32; a byte becomes a float by
//        one prmt and one subtraction (2^23 + 128 + q).
// INT8K: the same with the row's chunks of 512 dealt to KS warps: for few, long rows.
// INT4C: int4 (block 128, fp32 scales). Sixteen rows are the A operand of mma.m16n8k16; a nibble pair becomes bf16x2 by one
//        lop3 ((w & 0x000F000F) ^ 0x43084308 = 128 + 8 + q) and one exact subtraction. K split over KS warps, added in order.

#include <cuda_bf16.h>
typedef unsigned int u32; typedef unsigned long long u64;
__device__ __forceinline__ u32 prmt(u32 a,u32 b,u32 s){u32 r; asm("prmt.b32 %0,%1,%2,%3;":"=r"(r):"r"(a),"r"(b),"r"(s)); return r;}
__device__ __forceinline__ uint4 ldg(const void* p){uint4 v; asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];":"=r"(v.x),"=r"(v.y),"=r"(v.z),"=r"(v.w):"l"(p)); return v;}
__device__ __forceinline__ float fb(u32 w,u32 s){return __uint_as_float(prmt(w,0x4B000000u,s))-8388736.0f;}
#ifdef INT8
extern "C" __global__ __launch_bounds__(WARPS*32) void k(const unsigned char* __restrict__ w,const __nv_bfloat16* __restrict__ x,__nv_bfloat16* __restrict__ y,int N,int K,int stride){
  extern __shared__ float4 xs[];
  int lane=threadIdx.x&31, warp=threadIdx.x>>5;
  int chunks=K/512, tail=K-chunks*512;
  int nch=(K+511)/512;
  for(int i=threadIdx.x;i<nch*128;i+=WARPS*32){
    int c=i>>7, j=(i>>5)&3, l=i&31, kk=c*512+l*16+j*4; float4 v=make_float4(0,0,0,0);
    if(kk<K){ uint2 u=*(const uint2*)(x+kk); v.x=__uint_as_float(u.x<<16); v.y=__uint_as_float(u.x&0xffff0000u); v.z=__uint_as_float(u.y<<16); v.w=__uint_as_float(u.y&0xffff0000u);}
    xs[i]=v; }
  __syncthreads();
  for(int row=(blockIdx.x*WARPS+warp)*ROWS; row<N; row+=gridDim.x*WARPS*ROWS){
    float acc[ROWS]; const unsigned char* p[ROWS]; float sc[ROWS];
    #pragma unroll
    for(int r=0;r<ROWS;r++){acc[r]=0; int rr=row+r<N?row+r:N-1; p[r]=w+(u64)rr*stride+lane*16; sc[r]=*(const float*)(w+(u64)rr*stride+K);}
    #pragma unroll UNROLL
    for(int c=0;c<chunks;c++){
      uint4 v[ROWS];
      #pragma unroll
      for(int r=0;r<ROWS;r++) v[r]=ldg(p[r]+c*512);
      #pragma unroll
      for(int j=0;j<4;j++){
        float4 xv=xs[c*128+j*32+lane];
        #pragma unroll
        for(int r=0;r<ROWS;r++){ u32 q=((&v[r].x)[j])^0x80808080u;
          acc[r]=fmaf(fb(q,0x7440),xv.x,acc[r]); acc[r]=fmaf(fb(q,0x7441),xv.y,acc[r]); acc[r]=fmaf(fb(q,0x7442),xv.z,acc[r]); acc[r]=fmaf(fb(q,0x7443),xv.w,acc[r]); }
      }
    }
    if(tail && lane*16<tail){
      #pragma unroll
      for(int r=0;r<ROWS;r++){ uint4 v=ldg(p[r]+chunks*512);
        #pragma unroll
        for(int j=0;j<4;j++){ float4 xv=xs[chunks*128+j*32+lane]; u32 q=((&v.x)[j])^0x80808080u;
          acc[r]=fmaf(fb(q,0x7440),xv.x,acc[r]); acc[r]=fmaf(fb(q,0x7441),xv.y,acc[r]); acc[r]=fmaf(fb(q,0x7442),xv.z,acc[r]); acc[r]=fmaf(fb(q,0x7443),xv.w,acc[r]); } }
    }
    #pragma unroll
    for(int r=0;r<ROWS;r++){
      #pragma unroll
      for(int o=16;o;o>>=1) acc[r]+=__shfl_xor_sync(~0u,acc[r],o);
      if(lane==0&&row+r<N) y[row+r]=__float2bfloat16(acc[r]*sc[r]); }
  }
}
#endif
#ifdef INT8K
// KS warps share ROWS rows, chunks of 512 k dealt round; W warps = T groups
#define W (T*KS)
extern "C" __global__ __launch_bounds__(W*32) void k(const unsigned char* __restrict__ w,const __nv_bfloat16* __restrict__ x,__nv_bfloat16* __restrict__ y,int N,int K,int stride){
  extern __shared__ float4 xs[];
  __shared__ float red[T][KS][ROWS];
  int lane=threadIdx.x&31, warp=threadIdx.x>>5, ti=warp/KS, ks=warp%KS;
  int nch=(K+511)/512;
  for(int i=threadIdx.x;i<nch*128;i+=W*32){
    int c=i>>7, j=(i>>5)&3, l=i&31, kk=c*512+l*16+j*4; float4 v=make_float4(0,0,0,0);
    if(kk<K){ uint2 u=*(const uint2*)(x+kk); v.x=__uint_as_float(u.x<<16); v.y=__uint_as_float(u.x&0xffff0000u); v.z=__uint_as_float(u.y<<16); v.w=__uint_as_float(u.y&0xffff0000u);}
    xs[i]=v; }
  __syncthreads();
  for(int base=blockIdx.x*T*ROWS; base<N; base+=gridDim.x*T*ROWS){
    int row=base+ti*ROWS; float acc[ROWS]; const unsigned char* p[ROWS];
    #pragma unroll
    for(int r=0;r<ROWS;r++){acc[r]=0; int rr=row+r<N?row+r:N-1; p[r]=w+(u64)rr*stride+lane*16;}
    #pragma unroll UNROLL
    for(int c=ks;c<nch;c+=KS){
      uint4 v[ROWS]; bool in=c*512+lane*16<K;
      #pragma unroll
      for(int r=0;r<ROWS;r++) v[r]=in?ldg(p[r]+c*512):make_uint4(0,0,0,0);
      #pragma unroll
      for(int j=0;j<4;j++){
        float4 xv=xs[c*128+j*32+lane];
        #pragma unroll
        for(int r=0;r<ROWS;r++){ u32 q=((&v[r].x)[j])^0x80808080u;
          acc[r]=fmaf(fb(q,0x7440),xv.x,acc[r]); acc[r]=fmaf(fb(q,0x7441),xv.y,acc[r]); acc[r]=fmaf(fb(q,0x7442),xv.z,acc[r]); acc[r]=fmaf(fb(q,0x7443),xv.w,acc[r]); }
      }
    }
    #pragma unroll
    for(int r=0;r<ROWS;r++){
      #pragma unroll
      for(int o=16;o;o>>=1) acc[r]+=__shfl_xor_sync(~0u,acc[r],o);
      if(lane==0) red[ti][ks][r]=acc[r]; }
    __syncthreads();
    if(threadIdx.x<T*ROWS && base+threadIdx.x<N){ float v=0;
      #pragma unroll
      for(int i=0;i<KS;i++) v+=red[threadIdx.x/ROWS][i][threadIdx.x%ROWS];
      int rr=base+threadIdx.x; y[rr]=__float2bfloat16(v**(const float*)(w+(u64)rr*stride+K)); }
    __syncthreads();
  }
}
#endif
#ifdef INT4C
__device__ __forceinline__ u32 hsub(u32 a){ u32 r; asm("fma.rn.bf16x2 %0,%1,%2,%3;":"=r"(r):"r"(a),"r"(0x3F803F80u),"r"(0xC308C308u)); return r; }
__device__ __forceinline__ u32 pick(u32 w){ u32 r; asm("lop3.b32 %0,%1,%2,%3,0x6a;":"=r"(r):"r"(w),"r"(0x000F000Fu),"r"(0x43084308u)); return r; }
__device__ __forceinline__ void mma(float* c,u32 a0,u32 a1,u32 a2,u32 a3,u32 b0,u32 b1){
 asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};":"+f"(c[0]),"+f"(c[1]),"+f"(c[2]),"+f"(c[3]):"r"(a0),"r"(a1),"r"(a2),"r"(a3),"r"(b0),"r"(b1));}
#define W (T*KS)
extern "C" __global__ __launch_bounds__(W*32,MINB) void k(const unsigned char* __restrict__ w,const __nv_bfloat16* __restrict__ x,__nv_bfloat16* __restrict__ y,int N,int K,int stride){
  extern __shared__ uint4 xs[];
  __shared__ float red[T][KS][16];
  int lane=threadIdx.x&31, warp=threadIdx.x>>5, g=lane>>2, t=lane&3, ti=warp/KS, ks=warp%KS;
  int steps=K/128; int tile=blockIdx.x*T+ti;
#if PRE
  const unsigned char* p0=w+(u64)(tile*16+g)*stride+t*16; const unsigned char* p1=p0+(u64)8*stride;
  uint4 pa[PRE], pb[PRE];
  #pragma unroll
  for(int i=0;i<PRE;i++){ int s=ks+i*KS; if(s<steps){pa[i]=ldg(p0+s*64); pb[i]=ldg(p1+s*64);} }
#endif
  for(int i=threadIdx.x;i<K/8;i+=W*32){ uint4 v=((const uint4*)x)[i]; xs[i]=make_uint4(prmt(v.x,v.z,0x5410),prmt(v.x,v.z,0x7632),prmt(v.y,v.w,0x5410),prmt(v.y,v.w,0x7632)); }
  __syncthreads();
  for(; tile*16-ti*16<N; tile+=gridDim.x*T){
    float s0=0,s1=0;
    if(tile*16<N){
    const unsigned char* r0=w+(u64)(tile*16+g)*stride; const unsigned char* r1=r0+(u64)8*stride;
    const float* f0p=(const float*)(r0+K/2); const float* f1p=(const float*)(r1+K/2);
    auto body=[&](int s,uint4 a,uint4 b){
      float f0=__ldg(f0p+s), f1=__ldg(f1p+s);
      float c[4]={0,0,0,0}, d[4]={0,0,0,0};
      #pragma unroll
      for(int j=0;j<4;j++){
        uint4 xv=xs[s*16+t*4+j]; u32 wa=(&a.x)[j], wb=(&b.x)[j];
        mma(c,hsub(pick(wa)),hsub(pick(wb)),hsub(pick(wa>>4)),hsub(pick(wb>>4)),xv.x,xv.y);
        mma(CH==2?d:c,hsub(pick(wa>>8)),hsub(pick(wb>>8)),hsub(pick(wa>>12)),hsub(pick(wb>>12)),xv.z,xv.w);
      }
      s0=fmaf(c[0]+d[0],f0,s0); s1=fmaf(c[2]+d[2],f1,s1); };
#if PRE
    #pragma unroll
    for(int i=0;i<PRE;i++){ int s=ks+i*KS; if(s<steps) body(s,pa[i],pb[i]); }
    for(int s=ks+PRE*KS;s<steps;s+=KS) body(s,ldg(r0+s*64+t*16),ldg(r1+s*64+t*16));
#else
    #pragma unroll UNROLL
    for(int s=ks;s<steps;s+=KS) body(s,ldg(r0+s*64+t*16),ldg(r1+s*64+t*16));
#endif
    }
    if(KS==1){ if(t==0&&tile*16<N){ y[tile*16+g]=__float2bfloat16(s0); y[tile*16+g+8]=__float2bfloat16(s1);} }
    else {
    if(t==0){ red[ti][ks][g]=s0; red[ti][ks][g+8]=s1; }
    __syncthreads(); int first=(tile-ti)*16;
    if(threadIdx.x<T*16 && first+threadIdx.x<N){ float v=0;
      #pragma unroll
      for(int i=0;i<KS;i++) v+=red[threadIdx.x>>4][i][threadIdx.x&15]; y[first+threadIdx.x]=__float2bfloat16(v); }
    __syncthreads(); }
  }
}
#endif
