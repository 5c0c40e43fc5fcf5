// Run the checks of a program in their order, and print a line for each: `ok NAME`, or `failed NAME: reason`.

export const { BASE_URL, MODEL } = process.env;

export async function report(checks) {
  let failed = false;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`ok ${name}`);
    } catch (error) {
      console.error(error);
      console.log(`failed ${name}: ${String(error?.message ?? error).replace(/\s+/g, " ").slice(0, 400)}`);
      failed = true;
    }
  }
  process.exit(failed ? 1 : 0);
}
