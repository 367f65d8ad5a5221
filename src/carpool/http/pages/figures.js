// Figures from two moments: rates, means and quantiles, as Prometheus would compute them.
const BOUNDS = Array.from({ length: 17 }, (_, k) => 0.00025 * 2 ** k);

function counted(before, now) {
  return now.counts.map((n, i) => n - before.counts[i]);
}

function mean(before, now) {
  const n = now.counts.reduce((sum, x) => sum + x, 0) - before.counts.reduce((sum, x) => sum + x, 0);
  return n > 0 ? (now.sum_s - before.sum_s) / n : 0;
}

function sizesBetween(before, now) {
  const sizes = Object.entries(now).map(([size, n]) => [Number(size), n - (before[size] ?? 0)]);
  return sizes.filter(([, n]) => n > 0);
}

/** What has happened to a service, or to a stage, between two moments. */
export function differences(before, now, seconds = now.seconds) {
  if (now.outcomes) {
    const change = (name) => now.outcomes[name] - before.outcomes[name];
    const ok = change("ok");
    const all = Object.keys(now.outcomes).reduce((sum, name) => sum + change(name), 0);
    const lost = all - ok - change("cancelled");
    return {
      rate: all / seconds,
      okRate: ok / seconds,
      lostRate: lost / seconds,
      latency: counted(before.latency, now.latency),
      inSlo: ok > 0 ? (now.within_slo - before.within_slo) / ok : 1,
      firstPart: now.streams && counted(before.streams.first_part, now.streams.first_part),
      part: now.streams && counted(before.streams.part, now.streams.part),
    };
  }
  const sizes = sizesBetween(before.batch_sizes, now.batch_sizes);
  const batches = sizes.reduce((sum, [, n]) => sum + n, 0);
  return {
    sizes,
    meanBatch: batches ? sizes.reduce((sum, [size, n]) => sum + size * n, 0) / batches : 0,
    queue: counted(before.queue, now.queue),
    compute: counted(before.compute, now.compute),
    meanQueue: mean(before.queue, now.queue),
    meanCompute: mean(before.compute, now.compute),
    idleGap: mean(before.idle_gap, now.idle_gap),
  };
}

/** The quantile of a histogram, with a straight line inside each bucket; NaN if it is empty. */
export function quantile(counts, share) {
  const total = counts.reduce((sum, n) => sum + n, 0);
  if (total === 0) return NaN;
  let rest = share * total;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] > 0 && rest <= counts[i]) {
      if (i === BOUNDS.length) return BOUNDS.at(-1);
      const low = i === 0 ? 0 : BOUNDS[i - 1];
      return low + ((BOUNDS[i] - low) * rest) / counts[i];
    }
    rest -= counts[i];
  }
  return BOUNDS.at(-1);
}

export function number(value) {
  if (!Number.isFinite(value)) return "–";
  const digits = Number.isInteger(value) || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function milliseconds(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds >= 1 ? `${number(seconds)} s` : `${number(1000 * seconds)} ms`;
}

export function fraction(share) {
  return Number.isFinite(share) ? `${number(Math.round(1000 * share) / 10)} %` : "–";
}
