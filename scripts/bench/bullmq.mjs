// Fills a BullMQ queue, drains it and prints both rates in tasks a second, as JSON.
// Arguments: host, port, tasks, payload.
import { Queue, Worker } from 'bullmq';

const [host, port, count, payload] = process.argv.slice(2);
const connection = { host, port: Number(port) };
const queue = new Queue('bench', { connection, defaultJobOptions: { removeOnComplete: true } });
await queue.waitUntilReady();

async function rates(tasks) {
  const since = (start) => tasks / ((performance.now() - start) / 1000);

  let start = performance.now();
  for (let left = tasks; left > 0; left -= 500) {
    await queue.addBulk(Array.from({ length: Math.min(left, 500) }, () => ({ name: 'bench', data: { payload } })));
  }
  const enqueue = since(start);

  let handled = 0;
  let finished;
  const drained = new Promise((resolve) => { finished = resolve; });
  const worker = new Worker('bench', async () => {
    if (++handled === tasks) finished();
  }, { connection, concurrency: 50, autorun: false });
  await worker.waitUntilReady();

  start = performance.now();
  worker.run();
  await drained;
  const drain = since(start);
  await worker.close();
  return { enqueue, drain };
}

await rates(500); // node compiles what is hot; delayq and asynq have no such start
console.log(JSON.stringify(await rates(Number(count))));
await queue.close();
